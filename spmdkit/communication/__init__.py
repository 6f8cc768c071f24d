"""Communication between replicas: reducers/ (how gradients are reduced) and sync/ (when groups of replicas
synchronize).

Input: gradients or parameters of each replica. Output: those of all replicas.
"""
