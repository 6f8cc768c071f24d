"""Gradient reduction over replicas: one module per reducer, loaded by name (`spmdkit.foundation.plugins`).

Input: the gradient leaves of one replica and the reducer's state. Output: the reduced leaves and the new state
(`base.Reducer`).
"""
