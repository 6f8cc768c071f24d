"""What a run does to continue: restore, check that it is the same run, skip batches and rows, retry saves.

Enters: a run directory and its checkpoints. Leaves: a state, and the step to continue from.
"""
