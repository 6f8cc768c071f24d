"""Checks of a traced step: the task's return values, missing and repeated reductions, implicit sums from JAX's types.

Input: the jaxpr or the return values of a user's function. Output: none, or an error with the source line.
"""
