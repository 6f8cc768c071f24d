"""How the gradients of the replicas become one: a file each, found by its name (`spmdkit.foundation.plugins`);
`base.Reducer` is what it makes."""
