"""One training step: trace context, metrics, gradient, lowering, reduction, train state.

Input: a user's loss or step function, a train state and a batch. Output: the next state and the metrics.
"""
