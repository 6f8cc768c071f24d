"""Synchronization of groups of replicas: one module per sync, loaded by name (`spmdkit.foundation.plugins`).

Input: the parameters of each group and the sync's state. Output: one copy of the parameters for all groups
(`base.Sync`).
"""
