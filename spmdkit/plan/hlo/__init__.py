"""Parser of XLA's text: the instructions, loops, groups, collectives, live buffers and source lines of a compiled
program."""
