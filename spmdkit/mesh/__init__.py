"""The device mesh: its axes, which mesh axes shard which dim of an array, and the table of chips.

Enters: the sizes of the config, and devices. Leaves: a `Mesh`, and a `PartitionSpec` for each leaf.
"""
