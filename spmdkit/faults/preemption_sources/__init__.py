"""Who gives notice that this machine is about to be taken away: a file each, found by its name; `preemption: [gce]` in
a config. See base.py."""
