"""Steps of groups of replicas that train separately and synchronize as the sync requires.

Input: a state with one copy per group. Output: the next state, and the means over groups.
"""
