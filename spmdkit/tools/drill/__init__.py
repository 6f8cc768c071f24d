"""Fault-injection drills: the user's own job with injected faults, compared with the same job without them.

Enters: a config and faults (`kill:2@120`). Leaves: detection time, recovery time, repeated work, and whether the end is
bitwise equal. command.py runs both jobs, driver.py injects from the launcher, network.py simulates hosts.
"""
