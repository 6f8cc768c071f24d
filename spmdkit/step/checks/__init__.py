"""Checks of a traced step: what a task returns, reductions it forgot or made twice, sums that only types make.

Enters: the jaxpr or the values of a user's function. Leaves: nothing, or an error that names the line.
"""
