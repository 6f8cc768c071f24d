"""Fault injection inside of a process: which faults there are, how one is ordered, and what carries it out.

Enters: an order of the drill. Leaves: a process that exits, hangs or writes damaged files.
"""
