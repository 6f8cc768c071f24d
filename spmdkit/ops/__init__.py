"""Pieces of models that know how they are cut: one concept a file."""
