"""Commands that training never imports: bench, drill, migrate, doctor.

Input: a config, of spmdkit or of another project. Output: a report, a table or a new config.
"""
