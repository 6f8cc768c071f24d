"""Files, trees, jaxprs, clocks, names and texts: utilities for every other package, independent of training.

Input: paths, pytrees, plain values. Output: these values, read, written, compared or formatted.
"""
