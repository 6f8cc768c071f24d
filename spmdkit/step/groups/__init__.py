"""Steps of groups of replicas that train alone and agree when a sync says so.

Enters: a state with one copy for each group. Leaves: the next state, and the means that groups agree on.
"""
