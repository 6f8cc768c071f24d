"""Sources of preemption notices, one file each: `preemption: [gce]` in a config. See base.py."""
