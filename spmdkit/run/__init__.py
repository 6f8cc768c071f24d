"""A run from start to end.

run.py      directory, lock, restore               hooks/          functions called around a step, one file each
loop.py     the phases of training                 hook_runner.py  calls hooks; agrees on actions across processes
trainer.py  the loop over batches                  actions.py      evaluate, save, replace, roll back, stop
"""
