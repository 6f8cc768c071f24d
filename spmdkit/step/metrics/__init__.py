"""Metrics of a step: means, sums, maxima, counts, and those of the user.

Enters: values of examples. Leaves: partial results that `merge` adds over microbatches and replicas.
"""
