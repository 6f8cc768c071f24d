"""Files, trees, jaxprs, clocks, names and texts: utilities for every other package, independent of training.

Enters: paths, pytrees, plain values. Leaves: these values, read, written, compared or formatted.
"""
