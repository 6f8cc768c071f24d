"""`spmdkit bench communication`: trains the user's task with each reducer and sync, in alternating blocks, and compares
them with `sum`.

Input: a config and the reducers and syncs to compare. Output: a row for each with bytes sent, time and loss.
variants.py reads the command line, programs.py compiles, interleaved.py trains, figures.py computes the rows.
"""
