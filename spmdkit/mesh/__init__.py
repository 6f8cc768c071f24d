"""The device mesh: its axes, which dimension of an array goes over which axis, and the table of chips.

Enters: the sizes that a config names, and devices. Leaves: a `Mesh`, and a `PartitionSpec` for each leaf.
"""
