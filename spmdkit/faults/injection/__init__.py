"""Fault injection inside a process: kinds and specification (fault.py), and the injector (inject.py)."""
