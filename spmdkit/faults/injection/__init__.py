"""Fault injection inside of a process: the kinds of faults, their specification, and the code that injects them.

Enters: a request of the drill. Leaves: a process that exits, hangs or computes with damaged values.
"""
