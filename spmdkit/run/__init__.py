"""A run from its start to its end.

run.py      directory, lock, what is restored     hooks/          functions around a step, a file each
loop.py     the training as a list of steps       hook_runner.py  calls them; what all processes agree on
trainer.py  the loop over batches                 actions.py      evaluate, save, replace, roll back, stop
"""
