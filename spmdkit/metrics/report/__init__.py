"""HTML pages: the report of a run and the page of a plan, with their charts and drawings."""
