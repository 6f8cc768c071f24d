"""Commands that training never imports: bench, drill, migrate, doctor.

Enters: a config, or a foreign one. Leaves: a report, a table or a new config.
"""
