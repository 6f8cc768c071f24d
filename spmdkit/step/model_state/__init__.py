"""Model state that a loss returns: what each leaf depends on, and what replicas do to agree on it.

Enters: a jaxpr and the new state of each replica. Leaves: one state for all.
"""
