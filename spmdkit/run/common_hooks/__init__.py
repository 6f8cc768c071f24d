"""Hooks that a config enables by name, one file each, with `make(**options) -> Hook`: `hooks: [early_stopping]`."""
