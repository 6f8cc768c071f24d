"""Fault-injection drills: the user's job with injected faults, compared with the same job without them."""
