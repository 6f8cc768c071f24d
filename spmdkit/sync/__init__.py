"""When groups of replicas agree: a file each, found by its name (`spmdkit.kinds`); `base.Sync` is what it makes."""
