"""`spmdkit tune CONFIG`: settings that make the user's step faster and do not change what it computes.

Input: a config. Output: the measurements, and a config with the best settings. command.py is the command and its files,
search.py selects, measure.py times one variant next to the unchanged config, in a separate process.
"""
