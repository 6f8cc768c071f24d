"""Fault-injection drills: the user's own job with injected faults, compared with the same job without them."""
