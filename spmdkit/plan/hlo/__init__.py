"""The island that knows XLA's text: a compiled program's instructions, loops, groups, collectives, live buffers, places
in the source."""
