"""`spmdkit bench communication`: the user's task with each reducer and sync, trained in alternating blocks and compared
with `sum`.

Enters: a config and the reducers and syncs to compare. Leaves: a row for each with bytes sent, time and loss.
variants.py reads the command line, programs.py compiles, interleaved.py trains, figures.py computes the rows.
"""
