"""Practised disasters: the user's own job on this machine, hurt on order, and what became of it.

faults/injection/fault.py  what is ordered: `kill:2@120`              timeline.py  what was seen: faults, bars, events
timing.py    when a random one comes                   figures.py   detection, recovery, goodput of that
driver.py    looks on from the launcher, and hurts     compare.py   the same bits as if nobody had touched it
faults/injection/inject.py  what happens inside of a process          command.py   the two runs, and the answer
corrupt.py   what happens to a checkpoint
"""
