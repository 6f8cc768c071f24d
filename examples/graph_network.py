"""A graph network that learns shortest paths: messages along the edges of random graphs, in plain JAX.

    spmdkit train configs/graph_network.yaml

Each graph has points of the unit square as nodes. Edges join near points. The network predicts every node's distance to
a source along the edges. All rounds of messages use the same weights, and a node takes the maximum of its messages, as
in the algorithm of Bellman and Ford. Graphs of different sizes are padded: the edges of padding end at an additional
node, and padding nodes have no weight in the loss.

Expected: a mean error of 0.045 on graphs that were not trained on, where the straight line is off by 0.072.
0.6 minutes on two CPU cores.

Source: Battaglia et al., "Relational inductive biases, deep learning, and graph networks" (2018); Velickovic et al.,
"Neural Execution of Graph Algorithms" (2020).

Shape suffixes: N nodes, E edges, D width.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.sparse.csgraph import shortest_path

import spmdkit as sk

NODES, EDGES, RADIUS = 16, 96, 0.35
RULES = [(".*/up", [None, "mlp"]), (".*/down", ["mlp", None])]


def make_graph(random):
    """Returns one padded graph: `length` of each edge, and `distance` of each node to the source, node 0."""
    num = random.integers(NODES // 2, NODES + 1)
    points = random.uniform(size=(num, 2))
    apart = np.linalg.norm(points[:, None] - points[None], axis=-1)
    senders, receivers = np.nonzero((apart < RADIUS) & (apart > 0))
    senders, receivers = senders[:EDGES], receivers[:EDGES]
    length = apart[senders, receivers]
    matrix = np.zeros((num, num))
    matrix[senders, receivers] = length
    distance = shortest_path(matrix, indices=0)
    pad = lambda x, size, value: np.pad(x, [(0, size - len(x))] + [(0, 0)] * (x.ndim - 1), constant_values=value)
    return {
        "points": pad(points, NODES, 0).astype(np.float32),
        "senders": pad(senders, EDGES, NODES).astype(np.int32),
        "receivers": pad(receivers, EDGES, NODES).astype(np.int32),
        "length": pad(length, EDGES, 0).astype(np.float32),
        "distance": pad(np.where(np.isfinite(distance), distance, 0), NODES, 0).astype(np.float32),
        "is_reached": pad(np.isfinite(distance), NODES, False),
    }


def make_graphs(num, seed):
    random = np.random.default_rng(seed)
    graphs = [make_graph(random) for _ in range(num)]
    return {name: np.stack([graph[name] for graph in graphs]) for name in graphs[0]}


def init_params(key, width):
    def mlp(key, inputs, results):
        first, second = jax.random.split(key)
        up = jax.random.normal(first, (inputs, 2 * width)) * (2 / inputs) ** 0.5
        return {"up": up, "down": jax.random.normal(second, (2 * width, results)) / (2 * width) ** 0.5}

    keys = jax.random.split(key, 4)
    start = jax.random.normal(keys[3], (2, width))
    return {
        "start": start,
        "message": mlp(keys[0], 2 * width + 1, width),
        "update": mlp(keys[1], 2 * width, width),
        "distance": mlp(keys[2], width, 1),
    }


def apply(w, x):
    return jax.nn.relu(x @ w["up"]) @ w["down"]


def distances(params, graph, rounds):
    """Returns the predicted distance of each node of one graph, [N]."""
    is_source_N = (jnp.arange(NODES + 1) == 0).astype(jnp.int32)

    def exchange(h_ND, _):
        ends = (h_ND[graph["senders"]], h_ND[graph["receivers"]], graph["length"][:, None])
        message_ED = apply(params["message"], jnp.concatenate(ends, -1))
        most_ND = jax.ops.segment_max(message_ED, graph["receivers"], NODES + 1)
        most_ND = jnp.where(jnp.isfinite(most_ND), most_ND, 0.0)  # nodes without edges
        return jax.nn.standardize(h_ND + apply(params["update"], jnp.concatenate([h_ND, most_ND], -1))), None

    h_ND, _ = jax.lax.scan(exchange, params["start"][is_source_N], length=rounds)
    return apply(params["distance"], h_ND)[:NODES, 0]


@sk.task
def task(width=32, rounds=6, graphs=2048):
    """Returns the task; the arguments are the config's `task_args`."""

    def loss_fn(params, batch, key):
        error_BN = jax.vmap(lambda graph: distances(params, graph, rounds))(batch) - batch["distance"]
        counts = {"where": batch["is_reached"]}
        return sk.mean(error_BN**2, **counts), {"error": sk.mean(jnp.abs(error_BN), **counts)}

    return sk.Task(
        init=lambda key: init_params(key, width),
        loss_fn=loss_fn,
        optimizer=optax.adam,
        train_data=make_graphs(graphs, 0),
        eval_data=make_graphs(256, 1),
        rules=RULES,
        unit="graphs",
    )
