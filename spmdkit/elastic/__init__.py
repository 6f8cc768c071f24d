"""In-process elasticity: a job that loses or gains processes continues in the same processes, with the state from their
memory. The orders of the launcher and snapshots of the state enter; a driver of `spmdkit.run` (driver.py) leaves.
"""
