"""Streams such as functions: each module opens one kind of data as a `Stream` (base.py)."""
