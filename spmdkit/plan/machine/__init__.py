"""The machine that a plan is for: chips, links, and measured rates."""
