"""optax's own examples (a perceptron, lookahead, DP-SGD, SAM, adversarial training, freezing, accumulated gradients,
optimistic descent, perturbed optimizers, a learned rate, a rate that falls on a plateau), small, as tasks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk

NUM = 48
random = np.random.default_rng(0)
DATA = {
    "image": random.normal(size=(NUM, 12)).astype(np.float32),
    "label": random.integers(0, 4, NUM).astype(np.int32),
}
ce = optax.softmax_cross_entropy_with_integer_labels


def init(key):
    a, b = jax.random.split(key)
    weights = {"hidden": jax.random.normal(a, (12, 16)) / 4, "out": jax.random.normal(b, (16, 4)) / 4}
    return weights | {"b": jnp.zeros(16), "c": jnp.zeros(4)}


def net(params, x):
    return jax.nn.relu(x @ params["hidden"] + params["b"]) @ params["out"] + params["c"]


def losses_of(params, batch):
    return ce(net(params, batch["image"]), batch["label"])


def loss_fn(params, batch, key):
    return sk.mean(losses_of(params, batch))


def plain(optimizer, loss_fn=loss_fn, init=init):
    return sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=[("hidden", [None, "mlp"])])


def lookahead_mnist():
    """The parameters are fast and slow ones; the gradient is that of the fast ones."""
    optimizer = optax.lookahead(optax.adam(1e-2), sync_period=2, slow_step_size=0.5)

    def fast_loss(params, batch, key):
        return sk.mean(losses_of(params.fast, batch))

    def update(grads, state, params=None):
        return optimizer.update(grads.fast, state, params)

    both = optax.GradientTransformation(optimizer.init, update)
    return sk.Task(lambda key: optax.LookaheadParams.init_synced(init(key)), fast_loss, both, train_data=DATA)


def differentially_private_sgd():
    """Gradients of each example are clipped and added by the optimizer; the noise is that of its own key."""
    clip, noise = 1.0, 0.5
    optimizer = optax.chain(
        optax.add_noise(eta=(noise * clip / 16) ** 2, gamma=0.0, key=0),
        optax.sgd(0.3),
    )

    def train_step(state, batch):
        one = lambda params, row: losses_of(params, jax.tree.map(lambda x: x[None], row))[0]
        losses, grads = jax.vmap(jax.value_and_grad(one), (None, 0))(state.params, batch)
        sums, _ = optax.per_example_global_norm_clip(jax.tree.leaves(grads), clip)
        mean = jax.tree.unflatten(jax.tree.structure(state.params), [x / 16 for x in sums])
        return state.apply_gradients(mean), {"loss": losses.mean()}

    return sk.Task(init, train_step=train_step, optimizer=optimizer, train_data=DATA)


def adversarial_training():
    """Images are moved along the sign of the loss's own derivative, five times, within a ball."""

    def attacked(params, batch, epsilon=0.1):
        image = batch["image"]
        for _ in range(5):
            toward = jax.grad(lambda x: losses_of(params, batch | {"image": x}).sum())(image)
            image = jnp.clip(
                image + 0.4 * epsilon * jnp.sign(toward), batch["image"] - epsilon, batch["image"] + epsilon
            )
        return batch | {"image": jax.lax.stop_gradient(image)}

    def loss_fn(params, batch, key):
        decayed = 1e-4 * sum(jnp.sum(x**2) for x in jax.tree.leaves(params))
        loss = losses_of(params, attacked(jax.lax.stop_gradient(params), batch))
        return sk.mean(loss + decayed), {"clean": sk.mean(losses_of(params, batch))}

    return plain(optax.adam(1e-2), loss_fn)


def perturbed_optimizers():
    """A loss through an argmax that is smoothed by draws, those of each example by its own key."""
    hard = lambda x: jax.nn.one_hot(jnp.argmax(x, -1), x.shape[-1])
    smooth = optax.perturbations.make_perturbed_fun(hard, num_samples=8, sigma=0.5)

    def loss_fn(params, batch, key):
        chosen = jax.vmap(smooth)(sk.example_keys(), net(params, batch["image"]))
        return sk.mean(((chosen - jax.nn.one_hot(batch["label"], 4)) ** 2).sum(-1))

    return plain(optax.sgd(0.1), loss_fn)


def meta_learning():
    """The rate of an inner step is learned, by the derivative through that step."""

    def loss_fn(params, batch, key):
        rate = jax.nn.sigmoid(params["rate"])

        def adapted(row):
            row = jax.tree.map(lambda x: x[None], row)
            inner = jax.grad(lambda p: losses_of(p, row).sum())(params["net"])
            moved = jax.tree.map(lambda p, g: p - rate * g, params["net"], inner)
            return losses_of(moved, row)[0]

        return sk.mean(jax.vmap(adapted)(batch))

    start = lambda key: {"net": init(key), "rate": jnp.float32(-2.0)}
    return sk.Task(start, loss_fn, optax.adam(1e-2), train_data=DATA)


def lbfgs():
    return plain(optax.chain(optax.scale_by_lbfgs(memory_size=3), optax.scale(-0.1)))


ALL = (lookahead_mnist, differentially_private_sgd, adversarial_training, perturbed_optimizers, meta_learning, lbfgs)
TASKS = {f.__name__: f for f in ALL}
"""Name -> what makes the task."""
