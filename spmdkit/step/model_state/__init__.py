"""Model state that a loss returns: what each leaf depends on, and how it is reduced over replicas.

Input: a jaxpr and the new state of each replica. Output: one state for all.
"""
