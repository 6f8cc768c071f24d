"""Metrics of a step: means, sums, maxima, counts, and user-defined metrics.

Input: values of examples. Output: partial results that `merge` combines over microbatches and replicas.
"""
