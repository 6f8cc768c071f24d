"""Recovery of a run: restore, check that it is the same run, skip batches and rows, retry saves.

Input: a run directory with checkpoints. Output: a state, and the step to continue from.
"""
