"""When groups of replicas agree: a file each, found by its name (`spmdkit.foundation.plugins`); `base.Sync` is what it
makes."""
