"""Files, trees, jaxprs, clocks, names and texts: what every other folder may import, without any knowledge of training.

Enters: paths, pytrees, plain values. Leaves: the same, read, written, compared or formatted.
"""
