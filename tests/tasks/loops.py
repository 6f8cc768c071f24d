"""The classifier in loops of one's own, and evaluated by other metrics than a mean."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import spmdkit as sk
from tests.support.tasks import Trained, batches, check_evaluation, ids, mean_task, natural, normal, run_plain, updated
from tests.tasks.classifier import DATA, init, logits_of, losses_of


def step_of(optimizer):
    """Returns the step of the plain script."""

    @jax.jit
    def plain_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(lambda params: losses_of(params, batch).mean())(params)
        return *updated(optimizer, grads, params, opt_state), loss

    return plain_step


@natural
def early_stopping():
    """Early stopping on a held-out set, with the best parameters stored, in a custom loop."""
    optimizer, data = optax.sgd(2.0), {"x": normal(128, 12), "y": ids(4, 128)}
    test = {"x": normal(32, 12), "y": ids(4, 32)}

    def until_worse(steps):
        """Returns (losses, the best parameters, the last state) of (loss, parameters, state) after each step."""
        losses, best, bad = [], (np.inf, None), 0
        for loss, params, last in steps:  # noqa: B007 - returned
            losses.append(float(loss))
            bad = 0 if losses[-1] < best[0] else bad + 1
            best = (losses[-1], jax.device_get(params)) if bad == 0 else best
            if bad == 2:
                break
        return losses, best[1], last

    def plain():
        def steps():
            params, plain_step = init(jax.random.key(0)), step_of(optimizer)
            opt_state = optimizer.init(params)
            for batch in batches(data, 8):
                params, opt_state, _ = plain_step(params, opt_state, batch)
                yield losses_of(params, test).mean(), params, opt_state

        return until_worse(steps())

    def loop(program):
        def steps():
            state = program.init()
            for _, batch in program.batches():
                state, _ = program.step(state, batch)
                yield program.eval(state)["loss"], state.params, state

        return Trained(*until_worse(steps()), program)

    made = mean_task(init, losses_of, optimizer, data, eval_data=test)
    return made._replace(plain=plain, loop=loop, steps=8)


@natural
def streaming():
    """Data from a generator without an index, in a custom loop."""
    optimizer = optax.sgd(0.2, momentum=0.9)

    def stream():
        yield from batches(DATA)

    def plain():
        params = init(jax.random.key(0))
        return run_plain(step_of(optimizer), (params, optimizer.init(params)), [(batch,) for batch in stream()])

    def loop(program):
        state, losses = program.init(), []
        for batch in stream():
            state, metrics = program.step(state, program.put(batch))
            losses.append(metrics["loss"])
        return Trained(losses, jax.device_get(state.params), state, program)

    shapes = jax.tree.map(lambda x: x[:16], DATA)  # a task has data: here only their shapes
    return mean_task(init, losses_of, optimizer, shapes)._replace(plain=plain, loop=loop)


TEST = jax.tree.map(lambda x: x[:61], DATA)


@natural
def metrics():
    """Metrics of a whole test set: F1, AUC, accuracy per class, a confusion matrix, and perplexity."""

    def f1(c):
        """Of each class of a confusion matrix [label, prediction]."""
        return 2 * c.diagonal() / (c.sum(0) + c.sum(1)).clip(1)

    def auc(c):
        """Of class 0 against the rest, from histograms [is it, bin of the score]."""
        no, yes = c / c.sum(1, keepdims=True).clip(1)
        below = no.cumsum() - no
        return (yes * (below + no / 2)).sum()

    def plain_metrics(params):
        logits = np.asarray(logits_of(params, TEST))
        matrix, table = np.zeros((4, 4)), np.zeros((2, 20))
        np.add.at(matrix, (TEST["y"], logits.argmax(-1)), 1)
        score = np.asarray(jax.nn.softmax(logits))[:, 0]
        np.add.at(table, ((TEST["y"] == 0).astype(int), np.minimum(score * 20, 19).astype(int)), 1)
        perplexity = np.exp(np.asarray(losses_of(params, TEST)).mean())
        return {"matrix": matrix, "f1": f1(matrix), "auc": auc(table), "perplexity": perplexity}

    def eval_fn(params, batch):
        logits = logits_of(params, batch)
        matrix = sk.bincount((batch["y"], logits.argmax(-1)), (4, 4))
        bins = jnp.minimum(jax.nn.softmax(logits)[:, 0] * 20, 19).astype(jnp.int32)
        histogram = sk.bincount(((batch["y"] == 0).astype(jnp.int32), bins), (2, 20))
        perplexity = sk.derived(jnp.exp, sk.mean(losses_of(params, batch)))
        f1_auc = {"f1": sk.derived(f1, matrix), "auc": sk.derived(auc, histogram)}
        return {"matrix": matrix, "perplexity": perplexity, **f1_auc}

    made = mean_task(init, losses_of, optax.sgd(0.3), DATA, eval_data=TEST, eval_fn=eval_fn)
    return made._replace(check=lambda trained: check_evaluation(trained, plain_metrics(trained.params)))


@natural
def nnx_metrics():
    """Metrics of flax nnx in an evaluation: their states add, and nnx computes the rest."""
    new = lambda: {"accuracy": nnx.metrics.Accuracy(), "loss": nnx.metrics.Average("loss")}

    def plain_metrics(params):
        metrics = nnx.MultiMetric(**new())
        for batch in batches(TEST):
            metrics.update(logits=logits_of(params, batch), labels=batch["y"], loss=losses_of(params, batch))
        return metrics.compute()

    def eval_fn(params, batch):
        real, metrics = sk.example_mask(), new()
        metrics["accuracy"].update(logits=logits_of(params, batch), labels=batch["y"], mask=real)
        metrics["loss"].update(loss=losses_of(params, batch), mask=real)
        split = {name: nnx.split(metric) for name, metric in metrics.items()}
        return {name: sk.derived(lambda s, d=d: nnx.merge(d, s).compute(), s) for name, (d, s) in split.items()}

    made = mean_task(init, losses_of, optax.sgd(0.3), DATA, eval_data=TEST, eval_fn=eval_fn)
    return made._replace(check=lambda trained: check_evaluation(trained, plain_metrics(trained.params)))
