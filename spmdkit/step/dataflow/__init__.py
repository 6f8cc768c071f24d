"""Forward dataflow analysis of the jaxpr of a loss: how the rows of a replica enter each value.

Input: the jaxpr of one replica's loss on abstract values. Output: `Flow` of each result. Compiles nothing.
"""
