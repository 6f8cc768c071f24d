"""Models with a state besides their parameters: teachers, queues, statistics, random keys."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import spmdkit as sk
from tests.support.natural_runs import leaf_errors
from tests.support.tasks import (
    NaturalTask,
    batches,
    columns,
    example_keys,
    ids,
    mlp,
    mlp_init,
    natural,
    normal,
    run_plain,
    train_plain,
    updated,
    weights,
)
from tests.tasks.classifier import DATA

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def embed(params, x):
    z = mlp(params, x)
    return z / jnp.linalg.norm(z + 1e-6, axis=-1, keepdims=True)


def byol_losses(student, teacher, batch):
    return ((embed(student, batch["x"]) - embed(teacher, batch["x"][:, ::-1])) ** 2).sum(-1)


def moved(teacher, student):
    return jax.tree.map(lambda t, s: 0.9 * t + 0.1 * s, teacher, student)


net = mlp_init(12, 16, 6)
sgd = optax.sgd(0.2, momentum=0.9)


def with_state(net, state, losses_of, new_state, optimizer, data, move=None):
    """Returns the task of `losses_of(params, state, batch)` with a model state, and its script.

    Args:
        state: of the start, `state(params)`.
        new_state: `new_state(state, params, *more)`, where `losses_of` returns (losses, *more).
        move: the same of the script, where the task has a collective in it.
    """

    def init(key):
        params = net(key)
        return sk.Variables(params, jax.tree.map(jnp.copy, state(params)))

    def loss_fn(params, state, batch, key):
        losses, *more = losses_of(params, state, batch)
        return sk.mean(losses), {}, new_state(state, params, *more)

    def loss_of(params, state, batch):
        losses, *more = losses_of(params, state, batch)
        return losses.mean(), more

    task = sk.Task(init, loss_fn, optimizer, train_data=data, rules=columns(".*up"))
    after = lambda state, params, new, more: (move or new_state)(state, params, *more)
    return NaturalTask(task, lambda: train_plain(net, loss_of, optimizer, data, None, state, after)[:3])


@natural
def byol_state():
    """BYOL with the teacher in the model state, which the loss returns."""
    losses_of = lambda params, teacher, batch: (byol_losses(params, teacher, batch),)
    return with_state(net, lambda params: params, losses_of, moved, sgd, DATA)


@natural
def byol_ema():
    """BYOL with the toolkit's average of the parameters as its teacher."""

    def train_step(state, batch):
        loss_fn = lambda params, batch, key: sk.mean(byol_losses(params, state.ema, batch))
        (loss, _), grads = sk.value_and_grad(loss_fn)(state.params, batch, state.key)
        return state.apply_gradients(grads), {"loss": loss}

    task = sk.Task(net, train_step=train_step, optimizer=sgd, train_data=DATA, rules=columns("up"))
    loss_of = lambda params, teacher, batch: (byol_losses(params, teacher, batch).mean(), ())
    after = lambda teacher, params, new, _: moved(teacher, new)
    plain = lambda: train_plain(net, loss_of, sgd, DATA, None, lambda params: params, after)[:3]
    return NaturalTask(task, plain, {"ema": 0.9})


@natural
def byol_params():
    """BYOL with the teacher among the parameters, updated by the custom step."""

    def init(key):
        student = net(key)
        return {"student": student, "teacher": jax.tree.map(jnp.copy, student), "head": jnp.eye(6)}

    def losses_of(params, batch):
        teacher = jax.lax.stop_gradient(embed(params["teacher"], batch["x"][:, ::-1]))
        return ((embed(params["student"], batch["x"]) @ params["head"] - teacher) ** 2).sum(-1)

    taught = lambda params: params | {"teacher": moved(params["teacher"], params["student"])}

    def plain_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(lambda params: losses_of(params, batch).mean())(params)
        params, opt_state = updated(sgd, grads, params, opt_state)
        return taught(params), opt_state, loss

    def plain():
        params = init(jax.random.key(0))
        return run_plain(plain_step, (params, sgd.init(params)), [(batch,) for batch in batches(DATA)])

    def train_step(state, batch):
        loss_fn = lambda params, batch, key: sk.mean(losses_of(params, batch))
        (loss, _), grads = sk.value_and_grad(loss_fn)(state.params, batch, state.key)
        state = state.apply_gradients(grads)
        return state.replace(params=taught(state.params)), {"loss": loss}

    return NaturalTask(
        sk.Task(init, train_step=train_step, optimizer=sgd, train_data=DATA, rules=columns(".*/up")), plain
    )


@natural
def distillation():
    """Distillation: a large frozen teacher in the model state, and a small student."""
    teacher = weights(jax.random.key(9), up=(12, 64), down=(64, 4))

    def losses_of(student, teacher, batch):
        of_teacher, logits = jax.nn.softmax(mlp(teacher, batch["x"]) / 2), mlp(student, batch["x"])
        return (optax.softmax_cross_entropy(logits / 2, of_teacher) + 0.5 * cross_entropy(logits, batch["y"]),)

    student = mlp_init(12, 16, 4)
    return with_state(student, lambda _: teacher, losses_of, lambda state, _: state, optax.adam(1e-2), DATA)


@natural
def dqn():
    """DQN: a target network in the model state, copied periodically."""
    data = {"s": normal(64, 6), "a": ids(3, 64), "r": normal(64), "next": normal(64, 6, seed=1)}

    def losses_of(params, state, batch):
        chosen = jnp.take_along_axis(mlp(params, batch["s"]), batch["a"][:, None], -1)[:, 0]
        return (optax.huber_loss(chosen, batch["r"] + 0.9 * mlp(state["target"], batch["next"]).max(-1)),)

    def new_state(state, params):
        copied = jax.tree.map(lambda t, p: jnp.where(state["num"] % 2 == 1, p, t), state["target"], params)
        return {"target": copied, "num": state["num"] + 1}

    start = lambda params: {"target": params, "num": jnp.int32(0)}
    q = mlp_init(6, 16, 3)
    return with_state(q, start, losses_of, new_state, optax.sgd(0.2), data)


@natural
def moco():
    """MoCo: a queue of the embeddings of earlier batches as negatives, in the model state, equal on every replica."""

    def losses_of(params, queue, batch):
        q, k = embed(params, batch["x"]), jax.lax.stop_gradient(embed(params, batch["x"][:, ::-1]))
        logits = 5 * jnp.concatenate([(q * k).sum(-1, keepdims=True), q @ queue.T], -1)
        return cross_entropy(logits, jnp.zeros(len(q), jnp.int32)), k

    pushed = lambda queue, k: jnp.concatenate([k, queue])[:40]
    new_state = lambda queue, params, k: pushed(queue, sk.all_gather(k))
    move = lambda queue, params, k: pushed(queue, k)
    return with_state(net, lambda _: jnp.zeros((40, 6)), losses_of, new_state, optax.adam(1e-2), DATA, move)


IMAGES = {"image": normal(64, 8, 8, 1), "label": ids(4, 64)}


@natural
def cnn_linen():
    """A CNN in flax linen: BatchNorm, dropout, a schedule, clipping and an average of the parameters."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 4)

    class CNN(nn.Module):
        axes: tuple | None = None

        @nn.compact
        def __call__(self, x, keys=None):
            x = nn.Conv(4, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=keys is None, momentum=0.9, axis_name=self.axes)(x))
            x = nn.avg_pool(x, (4, 4), (4, 4)).reshape(len(x), -1)
            if keys is not None:  # one key an example: the same values are dropped on every mesh
                x = jax.vmap(lambda x, k: jnp.where(jax.random.bernoulli(k, 0.8, x.shape), x / 0.8, 0))(x, keys)
            return nn.Dense(4)(x)

    def losses_of(model, params, state, batch, keys):
        logits, new = model.apply({"params": params, **state}, batch["image"], keys, mutable=["batch_stats"])
        return cross_entropy(logits, batch["label"]), new

    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(schedule))

    def plain_step(params, state, ema, opt_state, batch, keys):
        def loss_fn(params):
            losses, new = losses_of(CNN(), params, state, batch, keys)
            return losses.mean(), new

        (loss, state), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        params, opt_state = updated(optimizer, grads, params, opt_state)
        return params, state, moved(ema, params), opt_state, loss

    def init(key):
        variables = CNN().init(key, IMAGES["image"][:1])
        return sk.Variables(variables["params"], {"batch_stats": variables["batch_stats"]})

    def plain():
        params, state = init(jax.random.key(0))
        inputs = [(batch, example_keys(step)) for step, batch in enumerate(batches(IMAGES))]
        start = (params, state, params, optimizer.init(params))
        losses, params, state, ema, opt_state = run_plain(plain_step, start, inputs)
        return losses, params, opt_state[1], state, ema

    def loss_fn(params, state, batch, key):
        losses, new = losses_of(CNN(("replica", "data")), params, state, batch, sk.example_keys())
        return sk.mean(losses), {}, new

    def check(trained, statistics, ema):
        assert max(leaf_errors(trained.state.ema, jax.device_get(ema)).values()) < 1e-5
        assert max(leaf_errors(trained.state.model_state, jax.device_get(statistics)).values()) < 1e-5

    rules = [("Dense_0/kernel", ["embed", "mlp"])]
    task = sk.Task(init, loss_fn, optax.sgd(schedule), train_data=IMAGES, rules=rules)
    return NaturalTask(task, plain, {"ema": 0.9, "clip_norm": 0.5}, check=check)


@natural
def cnn_nnx():
    """A CNN in flax nnx with dropout: typed random keys in the model state."""

    class CNN(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
            self.dropout = nnx.Dropout(0.0, rngs=rngs)  # plain draws differ by replica; at rate 0 the keys alone travel
            self.dense = nnx.Linear(16, 4, rngs=rngs)

        def __call__(self, x):
            x = nnx.avg_pool(nnx.relu(self.conv(x)), (4, 4), (4, 4)).reshape(len(x), -1)
            return self.dense(self.dropout(x))

    optimizer = optax.sgd(0.1, momentum=0.9)
    losses_of = lambda model, batch: cross_entropy(model(batch["image"]), batch["label"])

    @nnx.jit
    def plain_step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda model: losses_of(model, batch).mean())(model)
        optimizer.update(model, grads)
        return loss

    def plain():
        model = CNN(nnx.Rngs(jax.random.key(0)))
        of_model = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
        losses = [plain_step(model, of_model, batch) for batch in batches(IMAGES)]
        return losses, nnx.to_pure_dict(nnx.state(model, nnx.Param)), of_model.opt_state

    graphdef = nnx.split(nnx.eval_shape(lambda: CNN(nnx.Rngs(0))), nnx.Param, ...)[0]

    def init(key):
        _, params, rest = nnx.split(CNN(nnx.Rngs(key)), nnx.Param, ...)
        return sk.Variables(params, rest)

    def loss_fn(params, rest, batch, key):
        model = nnx.merge(graphdef, params, rest, copy=True)
        return sk.mean(losses_of(model, batch)), {}, nnx.split(model, nnx.Param, ...)[2]

    task = sk.Task(init, loss_fn, optimizer, train_data=IMAGES, rules=[("dense/kernel.*", ["embed", "mlp"])])
    return NaturalTask(task, plain, params_of=nnx.to_pure_dict)
