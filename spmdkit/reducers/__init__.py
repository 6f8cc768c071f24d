"""How the gradients of the replicas become one: a file each, found by its name (`spmdkit.kinds`); `base.Reducer` is what it makes."""
