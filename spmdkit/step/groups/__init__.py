"""Steps of replica groups that train separately and synchronize as the sync defines.

Input: a state with one copy per group. Output: the next state, and the means over groups.
"""
