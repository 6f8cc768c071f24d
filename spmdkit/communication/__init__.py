"""What replicas send each other: reducers/ (how gradients are added) and sync/ (when groups of replicas agree).

Enters: gradients or parameters of each replica. Leaves: those of all.
"""
