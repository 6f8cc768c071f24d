"""The device mesh: its axes, the mesh axes that shard each dim of an array, and the table of chips.

Input: the sizes of the config, and devices. Output: a `Mesh`, and a `PartitionSpec` for each leaf.
"""
