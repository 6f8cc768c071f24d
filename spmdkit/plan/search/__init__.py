"""Alternative configs for the same task, and the search for the best one."""
