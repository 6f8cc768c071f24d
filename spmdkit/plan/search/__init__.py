"""Other configs for the same task: which there are, and which is best."""
