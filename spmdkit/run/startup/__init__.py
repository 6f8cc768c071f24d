"""The phases before the first step: run directory, roles, health checks, and consistency checks across processes.

Input: a config and a cluster. Output: a directory that this run owns, or an error.
"""
