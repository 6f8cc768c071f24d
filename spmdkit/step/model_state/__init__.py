"""Model state that a loss returns: the inputs that each leaf depends on, and its reduction over replicas.

Input: a jaxpr and the new state of each replica. Output: one state for all replicas.
"""
