"""A run from its beginning to its end.

run.py       directory, lock, what is restored          hooks/      functions around a step, a file each
loop.py      the loop                                                 hook_runner.py  calls them; what all processes
agree on
actions.py   evaluate, save, replace, go back, stop
"""
