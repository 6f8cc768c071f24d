"""Checks of a traced step: return values of a task, missing and repeated reductions, implicit sums from JAX's types.

Input: the jaxpr or the return values of a user's function. Output: nothing, or an error that names the line.
"""
