"""What happens before the first step: the run directory, roles, health checks, and the check that all processes agree.

Enters: a config and a cluster. Leaves: a directory that this run owns, or an error.
"""
