"""What a person opens in a browser: the report of a run, the page of a plan, their charts and drawings."""
