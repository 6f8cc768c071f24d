"""How rows enter a loss, its metrics and the model state, read from the jaxpr before the first step."""

import dataclasses
import itertools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit import compat
from spmdkit.errors import ConfigError
from spmdkit.step import trace_context
from tests.step.random_programs import loss_of
from tests.step.row_programs import CLASSES, DATA, EQUAL, MIXED, ROWS, WIDTH, errors, init, logits, token_mask
from tests.support.forms import slow_except

PARTS = 4


@pytest.fixture(autouse=True)
def standard_promotion():
    """The programs are written as their authors would."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def build(loss, mesh=None, state=None, **changes):
    settings = {key: changes.pop(key) for key in ("microbatches",) if key in changes}
    if changes.get("row_mixing") == "error":
        settings["row_mixing"] = changes.pop("row_mixing")
    mesh = {"data": PARTS} if mesh is None else mesh
    config = sk.Config(task="t.py:t", batch_size=ROWS, steps=1, mesh=mesh, data={"shuffle": False}, **settings)
    variables = init if state is None else lambda key: sk.Variables(init(key), state)
    task = changes.pop("task", None) or sk.Task(variables, loss, optax.sgd(0.1), train_data=DATA, **changes)
    return sk.build(config, task=task, devices=jax.devices()[: int(np.prod([1, *mesh.values()]))])


def warnings(program):
    reports = ("mixes rows", "draws random numbers", "no rule")
    return [note for note in program.notes if any(report in note for report in reports)]


def value_of(loss, parts):
    """Returns the loss over `parts` replicas of one batch, pooled as the step pools it."""
    batch = jax.tree.map(lambda x: x[:ROWS].reshape(parts, -1, *x.shape[1:]), DATA)
    key = jax.random.key(1)

    num = ROWS // parts
    context = trace_context.Context(trace_context.ShardingSpec("mapped", sizes={"data": parts}))
    compat.add_multi_axis_vmap_rules()

    def of_part(rows, part):
        positions = part * num + jnp.arange(num, dtype=jnp.int32)
        examples = trace_context.Examples(num, None, positions, key)
        with trace_context.tracing(context), trace_context.with_examples(examples):
            out = loss(init(jax.random.key(0)), rows, key)
        return [(part.sum, part.count) for part in getattr(out, "parts", (out,))]

    both = jax.vmap(jax.vmap(of_part, axis_name="data"), axis_name="replica")
    sums = jax.jit(both)(jax.tree.map(lambda x: x[None], batch), jnp.arange(parts)[None])
    return sum(float(np.sum(s)) / float(np.sum(np.broadcast_to(c, (1, parts)))) for s, c in sums)


@pytest.mark.parametrize("name", EQUAL)
def test_equal_losses_are_not_reported(name):
    case = EQUAL[name]
    program = build(case.loss)
    [usage] = program.row_usages
    assert (usage.what, usage.rows) == ("loss", case.rows) and warnings(program) == []


@pytest.mark.parametrize("name", MIXED)
def test_mixed_rows_are_reported_with_their_line(name):
    program = build(MIXED[name].loss)
    assert [usage.rows for usage in program.row_usages] == ["mixed across rows"]
    [note] = warnings(program)
    assert "row_programs.py:" in note and "sk.all_gather" in note and "row_mixing='allow'" in note


DIFFERENT = [name for name in MIXED if name not in ("mean of replicas", "shuffled", "by position")]


@pytest.mark.parametrize("name", slow_except(["batch norm", "rmse", "pairs"], DIFFERENT))
def test_mixed_losses_differ_between_meshes(name):
    """Each of them is another number on four replicas, so that no reported loss is equal."""
    loss = MIXED[name].loss
    assert abs(value_of(loss, PARTS) - value_of(loss, 1)) > 1e-4 * abs(value_of(loss, 1))


def test_first_line_that_mixes_is_reported():
    def loss(p, b, k):
        h = logits(p, b)
        h = h / h.max()  # here
        h = jax.nn.relu(h) + jax.jit(jnp.sin)(h)
        return sk.mean((h - h.mean(0) - b["y"]) ** 2)

    [note] = warnings(build(loss))
    line = loss.__code__.co_firstlineno + 2
    assert note.startswith(f"tests/step/test_row_analysis.py:{line}: ")


def test_metrics_of_an_evaluation_are_analyzed():
    def eval_fn(p, b):
        right = logits(p, b).argmax(-1) == b["label"]
        precision = (right & (b["label"] == 1)).sum() / (b["label"] == 1).sum()
        return {"accuracy": sk.mean(right), "precision": sk.scalar(precision)}

    program = build(EQUAL["mse"].loss, eval_fn=eval_fn, eval_data=DATA)
    table = {row.name: row.rows for row in program.row_table}
    assert table == {
        "loss": "as a mean",
        "evaluation metric accuracy": "as a mean",
        "evaluation metric precision": "mixed across rows",
    }
    [note] = warnings(program)
    assert "eval_fn mixes rows in evaluation metric 'precision'" in note


def callback(x):
    return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="expand_dims")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Total:
    total: jax.Array

    def merge(self, other):
        return Total(self.total + other.total)

    def compute(self):
        return self.total


METRICS = {
    "largest": (lambda h, b: sk.max(h), "row by row"),
    "largest of sums": (lambda h, b: sk.max(h.sum(0)), "mixed across rows"),
    "largest of a constant": (lambda h, b: sk.max(jnp.ones(3)), "not at all"),
    "sum": (lambda h, b: sk.sum(h), "as a sum"),
    "sum of mixed rows": (lambda h, b: sk.sum(h / h.max()), "mixed across rows"),
    "sum of means": (lambda h, b: sk.sum(h.mean(0)), "mixed across rows"),
    "sum of maxima": (lambda h, b: sk.sum(h.max(0)), "mixed across rows"),
    "derived": (lambda h, b: sk.derived(jnp.exp, sk.mean(h)), "as a mean"),
    "derived of mixed rows": (lambda h, b: sk.derived(jnp.exp, sk.mean(h / h.max())), "mixed across rows"),
    "sum of zeros": (lambda h, b: sk.sum(jnp.zeros_like(h)), "not at all"),
    "counts": (lambda h, b: sk.bincount(b["label"], CLASSES), "as a sum"),
    "two": (lambda h, b: sk.mean(h) + sk.mean(h / h.max()), "mixed across rows"),
    "callback": (lambda h, b: sk.mean(callback(h)), "unknown"),
    "derived of a tree": (lambda h, b: sk.derived(lambda t: t["h"], {"h": h.sum(), "zero": jnp.zeros(2)}), "as a sum"),
    "mean of ones": (lambda h, b: sk.mean(jnp.ones(3)), "not at all"),
    "mean of the number": (lambda h, b: sk.mean(jnp.full(3, 1.0 * len(h))), "mixed across rows"),
    "mean of shares": (
        lambda h, b: sk.mean(jnp.full(3, 1 / len(h)), weights=jnp.full(3, 1.0 * len(h))),
        "mixed across rows",
    ),
    "sum of scaled maxima": (lambda h, b: sk.sum(len(h) * h.max(0)), "mixed across rows"),
    "of a user": (lambda h, b: Total(h.sum()), "as a sum"),
    "of a user with mixed rows": (lambda h, b: Total((h / h.max()).sum()), "mixed across rows"),
    "of a user by a callback": (lambda h, b: Total(callback(h).sum()), "unknown"),
}


def test_how_rows_enter_metrics():
    def loss(p, b, k):
        h = jax.lax.stop_gradient(logits(p, b))
        return sk.mean(errors(p, b)), {name: metric(h, b) for name, (metric, _) in METRICS.items()}

    table = {row.name: row for row in build(loss).row_table}
    assert {n: table[f"metric {n}"].rows for n in METRICS} == {n: rows for n, (_, rows) in METRICS.items()}
    assert "no rule for pure_callback at tests/step/" in table["metric callback"].why
    assert "mixed at tests/step/" in table["metric two"].why


def test_row_mixing_is_an_error_or_allowed():
    loss = MIXED["batch norm"].loss
    with pytest.raises(ConfigError, match=r"row_mixing is error\. .*row_programs\.py:\d+: loss_fn mixes rows in loss"):
        build(loss, row_mixing="error")
    assert warnings(build(loss, row_mixing="allow")) == []
    assert len(warnings(build(loss, mesh={}))) == 1  # one device reports it too
    assert build(EQUAL["mse"].loss, row_mixing="error").row_usages[0].rows == "as a mean"


def test_rows_of_all_replicas_are_reported_with_microbatches_only():
    loss = EQUAL["batch norm of all replicas"].loss
    assert warnings(build(loss)) == []
    [note] = warnings(build(loss, microbatches=2))
    assert "one of 2 microbatches" in note


@pytest.mark.parametrize("whole", [False, True])
def test_a_running_mean_by_counts_needs_the_rows_of_all_replicas(whole):
    """Welford's running mean: the share of a batch depends on the number of its rows."""

    def loss(p, s, b, k):
        add = sk.psum if whole else lambda x: x
        num = add(jnp.float32(len(b["x"])))
        seen = s["seen"] + num
        mean = s["mean"] + (add(b["x"].sum(0)) / num - s["mean"]) * num / seen
        return sk.mean(errors(p, b)), {}, {"mean": mean, "seen": seen}

    state = {"mean": jnp.zeros(WIDTH), "seen": jnp.float32(0)}
    if whole:
        table = {row.name: row.replicas for row in build(loss, state=state).row_table}
        assert table["state mean"] == table["state seen"] == "identical"
        return
    with pytest.raises(ConfigError, match=r"model state 'mean'.*sk\.psum.*state_reduction="):
        build(loss, state=state)


@pytest.mark.parametrize("reads", [False, True])
def test_a_reduced_leaf_that_the_loss_reads_differs_between_microbatches(reads):
    """A replica reads in its second microbatch what it has added itself."""

    def loss(p, s, b, k, reduce=lambda x: x):
        values = errors(p, b)
        center = 0.9 * s["center"] + 0.1 * reduce(b["x"].mean(0))
        return sk.mean(values * (1 + s["center"].sum() ** 2) if reads else values), {}, {"center": center}

    of = lambda loss, **more: [n for n in build(loss, state={"center": jnp.zeros(WIDTH)}, **more).notes if "reads" in n]
    assert of(loss) == of(loss, microbatches=2, mesh={}) == of(loss, microbatches=2, row_mixing="allow") == []
    notes = of(loss, microbatches=2)
    assert len(notes) == reads and all("model state 'center'" in note and "sk.pmean" in note for note in notes)
    assert of(lambda p, s, b, k: loss(p, s, b, k, sk.pmean), microbatches=2) == []


STATE = {
    "mean": (jnp.zeros(WIDTH), lambda s, p, b: 0.9 * s + 0.1 * b["x"].mean(0), "mean"),
    "seen": (jnp.float32(0), lambda s, p, b: s + b["x"].shape[0], "sum"),
    "seen_int": (jnp.int32(0), lambda s, p, b: s + len(b["x"]), "sum"),
    "positive": (jnp.float32(0), lambda s, p, b: s + (b["x"] > 0).sum(), "sum"),
    "histogram": (jnp.zeros(CLASSES), lambda s, p, b: s.at[b["label"]].add(1), "sum"),
    "tokens": (jnp.int32(0), lambda s, p, b: s + token_mask(b).sum(), "sum"),
    "steps": (jnp.int32(0), lambda s, p, b: s + 1, "identical"),
    "teacher": (jnp.zeros((WIDTH, CLASSES)), lambda s, p, b: 0.9 * s + 0.1 * p["w"], "identical"),
    "all": (jnp.zeros(WIDTH), lambda s, p, b: 0.9 * s + 0.1 * sk.pmean(b["x"].std(0) ** 0), "identical"),
    "queue of all": (
        jnp.zeros((32, CLASSES)),
        lambda s, p, b: jnp.concatenate([sk.all_gather(logits(p, b)), s])[:32],
        "identical",
    ),
}
"""name -> (start, update, derived reduction)."""


@pytest.mark.parametrize("mesh", [{"data": 4}, {"fsdp": 4}, {"data": 2, "fsdp": 2}], ids=str)
def test_reductions_of_the_model_state_are_derived(mesh):
    start = {name: x for name, (x, _, _) in STATE.items()}
    loss = lambda p, s, b, k: (sk.mean(errors(p, b)), {}, {n: STATE[n][1](s[n], p, b).astype(s[n].dtype) for n in s})
    program, one = build(loss, mesh=mesh, state=start), build(loss, mesh={}, state=start)
    table = {row.name: row for row in program.row_table}
    assert {n: table[f"state {n}"].replicas for n in STATE} == {n: kind for n, (_, _, kind) in STATE.items()}
    found, expected = (p.step(p.init(), next(iter(p.batches()))[1])[0].model_state for p in (program, one))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


REFUSED = {
    "queue": (jnp.zeros((32, CLASSES)), lambda s, p, b: jnp.concatenate([logits(p, b), s])[:32]),
    "ring": (jnp.zeros((32, CLASSES)), lambda s, p, b: jax.lax.dynamic_update_slice(s, logits(p, b), (4, 0))),
    "rolled": (jnp.zeros((32, CLASSES)), lambda s, p, b: jnp.roll(s, 4, 0).at[: len(b["x"])].set(logits(p, b))),
    "table": (jnp.zeros((64, CLASSES)), lambda s, p, b: s.at[b["id"]].set(logits(p, b))),
    "averaged table": (jnp.zeros((64, 1)), lambda s, p, b: s.at[b["id"]].set(0.9 * s[b["id"]] + 0.1)),
    "last": (jnp.zeros(WIDTH), lambda s, p, b: b["x"][-1]),
    "deviation": (jnp.zeros(WIDTH), lambda s, p, b: 0.9 * s + 0.1 * b["x"].std(0)),
    "largest": (jnp.zeros(WIDTH), lambda s, p, b: 0.9 * s + 0.1 * b["x"].max(0)),
    "average of sums": (jnp.zeros(WIDTH), lambda s, p, b: 0.9 * s + 0.1 * b["x"].sum(0)),
    "class means": (
        jnp.zeros((CLASSES, WIDTH)),
        lambda s, p, b: (lambda o: 0.9 * s + 0.1 * (o.T @ b["x"]) / o.sum(0)[:, None])(
            jax.nn.one_hot(b["label"], CLASSES)
        ),
    ),
    "first value": (
        jnp.zeros(WIDTH),
        lambda s, p, b: jnp.where(s == 0, b["x"].mean(0), 0.9 * s + 0.1 * b["x"].mean(0)),
    ),
    "decay by the number": (jnp.zeros(CLASSES), lambda s, p, b: s + 0.999 ** len(b["x"]) * p["w"][0]),
    "averaged count": (jnp.float32(0), lambda s, p, b: 0.9 * s + b["x"].shape[0]),
    "moved": (jnp.zeros(WIDTH), lambda s, p, b: s - 0.1 * (s - b["x"].sum(0))),
    "assigned": (
        jnp.ones(WIDTH),
        lambda s, p, b: 0.9 * s + 0.1 * jax.nn.one_hot(jnp.argmin((b["x"] - s) ** 2, -1), WIDTH).sum(0),
    ),
    "counted nearest": (
        jnp.ones(WIDTH),
        lambda s, p, b: s + jax.nn.one_hot(jnp.argmin((b["x"] - s) ** 2, -1), WIDTH).sum(0),
    ),
    "squared distances": (jnp.zeros(WIDTH), lambda s, p, b: s + ((b["x"] - b["x"].mean(0)) ** 2).sum(0)),
    "scaled largest": (jnp.zeros(WIDTH), lambda s, p, b: s + len(b["x"]) * b["x"].max(0)),
    "halved": (jnp.zeros(WIDTH), lambda s, p, b: jax.jit(lambda s: s / 2)(s).at[b["label"]].add(b["x"][:, 0])),
}


SCALED = {"last": 0, "deviation": 0.9, "largest": 0.9, "average of sums": 0.9, "class means": 0.9}
SCALED |= {"averaged count": 0.9, "moved": 0.9, "assigned": 0.9, "halved": 0.5}
"""name -> known factor of the old value. A sum over replicas is another value unless it is 1."""


@pytest.mark.parametrize("name", REFUSED)
def test_other_state_must_be_declared(name):
    start, update = REFUSED[name]
    loss = lambda p, s, b, k: (sk.mean(errors(p, b)), {}, {name: update(s[name], p, b)})
    with pytest.raises(
        ConfigError, match=rf"model state '{name}'.*sk\.all_gather.*sk\.psum.*state_reduction="
    ) as error:
        build(loss, state={name: start})
    scaled = name in SCALED
    assert all(kind in str(error.value) for kind in ("'mean'", "'max'", "'identical'"))
    assert scaled != ("'sum'" in str(error.value))
    build(loss, state={name: start}, mesh={})
    declared = build(loss, state={name: start}, state_reduction={name: "mean"})
    assert declared.row_table[-1].why == "declared in Task.state_reduction"
    if scaled:
        with pytest.raises(ConfigError, match=rf"sum for model state '{name}'.* by {SCALED[name]:.1g}\..*sk\.psum"):
            build(loss, state={name: start}, state_reduction={name: "sum"})


@jax.custom_vjp
def observed(x, history):
    return x


observed.defvjp(
    lambda x, history: (x, (jnp.abs(x).max(), history)),
    lambda saved, g: (g, jnp.append(saved[1][1:], saved[0])),
)


def test_gradients_that_do_not_depend_on_the_loss_are_reported():
    loss = lambda p, b, k: sk.mean(observed(errors(p, b), p["net"]["amax"]))
    task = sk.Task(lambda key: init(key) | {"net": {"amax": jnp.ones(4)}}, loss, optax.sgd(0.1), DATA)
    [note] = build(loss, task=task).notes
    assert "gradient of net/amax does not depend on the cotangent" in note and "overwritten=['net/amax']" in note
    assert build(loss, task=dataclasses.replace(task, overwritten=["net/amax"])).notes == []


def test_unknown_primitive_is_a_warning():
    def callback(p, b, k):
        shape = jax.ShapeDtypeStruct(b["x"].shape, jnp.float32)
        x = jax.pure_callback(lambda x: x, shape, b["x"], vmap_method="expand_dims")
        return sk.mean((x @ jax.lax.stop_gradient(p["w"]) - b["y"]) ** 2) + 0 * sk.mean(errors(p, b))

    [note] = warnings(build(callback, row_mixing="error"))
    assert "pure_callback" in note and "spmdkit verify" in note


def test_analysis_compiles_nothing_and_is_part_of_the_table(capsys):
    program = build(MIXED["rmse"].loss)
    assert "compiled" not in program.__dict__
    text = program.explain()
    assert "leaf or metric" in text and "mixed across rows" in text


@pytest.mark.parametrize("first", slow_except([30], range(0, 100, 5)))
def test_everything_that_differs_between_meshes_is_reported(first):
    """Random programs. Those that mix rows are other numbers on four replicas, with few exceptions (a layer after which
    nothing is left of the mixing); all others are equal."""
    for seed in range(first, first + 5):
        names, mixes, loss = loss_of(seed)
        one, four = value_of(loss, 1), value_of(loss, PARTS)
        differs = not np.isclose(one, four, rtol=1e-4, atol=1e-6)
        reported = bool(warnings(build(loss)))
        assert reported or not differs, (seed, names, one, four)
        assert mixes or not (differs or reported), (seed, names, one, four)
        assert reported == mixes, (seed, names, one, four)


def noise(key, batch):
    return jax.random.normal(key, batch["y"].shape)


def looped_noise(key_of, batch, xs):
    return jax.lax.scan(lambda c, i: (c + noise(key_of(i), batch), None), batch["y"], xs)[0]


def example_noise(keys):
    return jax.vmap(lambda key: jax.random.normal(key, (CLASSES,)))(keys)


ONCE, AGAIN, LOOP = "once", "several times: ", "once for all iterations of a loop: "
SAME = "the same numbers on every replica: "
KEYS = {
    "no draw": (lambda b, k: b["y"], "not used"),
    "one draw": (lambda b, k: noise(k, b), ONCE),
    "two draws": (lambda b, k: noise(k, b) + noise(k, b), AGAIN),
    "split": (lambda b, k: (lambda a, c: noise(a, b) + noise(c, b))(*jax.random.split(k)), ONCE),
    "one half twice": (lambda b, k: noise(jax.random.split(k)[0], b) * noise(jax.random.split(k)[0], b), AGAIN),
    "folded": (lambda b, k: noise(jax.random.fold_in(k, 1), b) + noise(jax.random.fold_in(k, 2), b), ONCE),
    "folded alike": (lambda b, k: noise(jax.random.fold_in(k, 1), b) + noise(jax.random.fold_in(k, 1), b), AGAIN),
    "folded alike by a value": (
        lambda b, k: (lambda i: noise(jax.random.fold_in(k, i), b) * noise(jax.random.fold_in(k, i), b))(b["id"][0]),
        AGAIN,
    ),
    "two keys carried": (
        lambda b, k: (lambda end: noise(end[0], b) + noise(end[1], b))(
            jax.lax.fori_loop(0, 3, lambda i, ks: [jax.random.split(key)[0] for key in ks], list(jax.random.split(k)))
        ),
        ONCE,
    ),
    "two keys drawn in a loop": (
        lambda b, k: jax.lax.scan(
            lambda c, ks: (c + noise(ks[0], b) * noise(ks[1], b), None),
            b["y"],
            (jax.random.split(k, 3), jax.random.split(jax.random.fold_in(k, 1), 3)),
        )[0],
        ONCE,
    ),
    "loop": (lambda b, k: looped_noise(lambda i: k, b, jnp.arange(3)), LOOP),
    "loop with the iteration": (lambda b, k: looped_noise(lambda i: jax.random.fold_in(k, i), b, jnp.arange(3)), ONCE),
    "loop over keys": (lambda b, k: looped_noise(lambda key: key, b, jax.random.split(k, 3)), ONCE),
    "carried": (
        lambda b, k: jax.lax.fori_loop(0, 3, lambda i, c: (jax.random.split(c[0])[0], noise(c[0], b)), (k, b["y"]))[1],
        ONCE,
    ),
    "example keys": (lambda b, k: example_noise(sk.example_keys()), ONCE),
    "example keys twice": (
        lambda b, k: (lambda keys: example_noise(keys) + example_noise(keys))(sk.example_keys()),
        AGAIN,
    ),
    "jit": (lambda b, k: jax.jit(noise)(k, b) + jax.jit(noise)(k, b), AGAIN),
    "folded by arrays": (
        lambda b, k: sum(noise(jax.vmap(jax.random.fold_in, (None, 0))(k, jnp.full(2, i))[0], b) for i in (1, 2)),
        ONCE,
    ),
    "changed words": (
        lambda b, k: noise(jax.random.wrap_key_data(jax.random.key_data(k).at[0].add(jnp.uint32(1))), b),
        ONCE,
    ),
    "constant key of columns in a loop": (
        lambda b, k: (lambda end: end[1] * jax.random.normal(end[0], (CLASSES,)))(
            jax.lax.fori_loop(
                0,
                3,
                lambda i, c: (jax.random.split(c[0])[0], c[1] * jax.random.normal(c[0], (CLASSES,))),
                (jax.random.key(0), b["y"]),
            )
        ),
        "not used",
    ),
    "constant key": (lambda b, k: noise(jax.random.key(0), b), SAME),
    "constant key beside another": (lambda b, k: noise(jax.random.PRNGKey(0), b) + noise(k, b), SAME),
    "constant key in a loop": (lambda b, k: looped_noise(lambda i: jax.random.key(i), b, jnp.arange(3)), SAME),
    "constant key in a branch": (
        lambda b, k: jax.lax.cond(b["y"].sum() > 0, lambda: noise(jax.random.key(0), b), lambda: b["y"]),
        SAME,
    ),
    "constant keys of rows": (lambda b, k: example_noise(jax.random.split(jax.random.key(0), len(b["y"]))), SAME),
    "constant key of columns": (lambda b, k: b["y"] * jax.random.normal(jax.random.key(0), (CLASSES,)), "not used"),
    "constant key for one number of rows": (
        lambda b, k: noise(jax.random.key(0), b) + b["y"].reshape(ROWS // PARTS, CLASSES),
        "not used",
    ),
    "key of the replica": (
        lambda b, k: noise(jax.random.fold_in(jax.random.key(0), sk.replica_index()), b),
        "not used",
    ),
    "keys of ids": (
        lambda b, k: example_noise(jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0), i))(b["id"])),
        "not used",
    ),
}


@pytest.mark.parametrize("name", KEYS)
def test_uses_of_keys_are_counted(name):
    draw, expected = KEYS[name]
    program = build(lambda p, b, k: sk.mean(errors(p, b)) + 0 * sk.mean(draw(b, k)))
    [row] = program.row_table
    assert row.keys == expected if expected in (ONCE, "not used") else row.keys.startswith(f"{expected}tests/step/")


def keyed(own):
    """Builds a loss that draws from the key in its model state; `own`: with the index of the replica."""

    def loss(p, state, b, k):
        key = jax.random.fold_in(state["key"], sk.replica_index()) if own else state["key"]
        return sk.mean(errors(p, b) * noise(key, b)), {}, {"key": jax.random.split(state["key"])[0]}

    return build(loss, state={"key": jax.random.key(1)})


def test_rows_drawn_from_a_shared_key_are_reported():
    [note] = [note for note in keyed(False).notes if "draws random numbers" in note]
    assert re.match(r"tests/step/test_row_analysis\.py:\d+: loss_fn draws random numbers for the rows in loss", note)
    assert "sk.example_keys()" in note and not [n for n in keyed(True).notes if "draws random numbers" in n]


GENERATOR = np.random.default_rng(0)
TRACE = itertools.count()
TRACED_ONCE = {
    "np.random": lambda h: h + np.random.normal(size=(CLASSES,)).astype(np.float32),
    "a generator": lambda h: h * GENERATOR.random(),
    "in a jitted function": lambda h: jax.jit(lambda h: h + np.random.rand(CLASSES).astype(np.float32))(h),
    "in a scan": lambda h: jax.lax.scan(lambda c, _: (c * np.float32(np.random.rand()), None), h, None, length=2)[0],
    "the time": lambda h: h * (time.perf_counter() % 1),
    "a random branch": lambda h: jnp.sin(h) if next(TRACE) % 2 else h,
    "a random branch of one length": lambda h: jnp.sin(h) if next(TRACE) % 2 else jnp.cos(h),
    "a random constant operand": lambda h: h * 2.0 if next(TRACE) % 2 else h * h,
    "in a branch": lambda h: jax.lax.cond(
        h.sum() > 0, lambda h: h * np.random.normal(size=(CLASSES,)).astype(np.float32), lambda h: h, h
    ),
    "a random column": lambda h: h[:, next(TRACE) % 2 :][:, :1],
}


@pytest.mark.parametrize("name", TRACED_ONCE)
def test_numbers_made_while_tracing_are_refused(name):
    loss = lambda p, b, k: sk.mean((TRACED_ONCE[name](logits(p, b)) - b["y"]) ** 2)
    with pytest.raises(ConfigError, match=r"test_row_analysis\.py:\d+: loss_fn uses a number that is made while it is"):
        build(loss)


def test_constant_arrays_and_a_print_of_one_trace_are_accepted():
    weights, trace = np.random.default_rng(0).normal(size=(CLASSES,)).astype(np.float32), itertools.count()

    def loss(p, b, k):
        h = logits(p, b) * weights * np.float32(0.5)
        if next(trace) == 0:
            jax.debug.print("{}", jnp.abs(h).max())
        return sk.mean((h - np.nan_to_num(b["y"].shape[1])) ** 2)

    build(loss)
