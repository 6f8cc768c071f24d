"""What a plan is for: chips and their links, and the rates measured on this machine."""
