"""In-process elasticity: a job that loses or gains processes continues in the remaining ones, with the state from their
memory. Input: membership updates of the launcher and snapshots. Output: a driver of `spmdkit.run` (driver.py).
"""
