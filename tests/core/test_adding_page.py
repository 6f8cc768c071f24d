"""The examples of docs/development/adding.md, written as the files that the page names: each is used."""

import csv
import http.server
import json
import re
import sys
import threading
import types
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit import cluster
from spmdkit.cluster.environments.base import Partial
from spmdkit.foundation import plugins
from spmdkit.plan.collectives_bill import read_bill
from spmdkit.plan.hlo.text import parse
from tests.cluster import starter_environments
from tests.cluster.starter_environments import LATER_PORT
from tests.ops.test_op_contracts import MESH, draw, value_and_grad
from tests.support.core_hlo import collectives
from tests.support.core_runs import assert_close, program_of
from tests.support.distributions import install
from tests.support.ops_mesh import step, wire
from tests.support.reducer_runs import NUM_VALUES, applied_and_owed, program, train, true_sum, wide
from tests.support.reducer_runs import task as two_layers

PAGE = Path(__file__).parents[2] / "docs" / "development" / "adding.md"
FILES = dict(re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL))


@pytest.fixture
def added(tmp_path, monkeypatch):
    """Returns a function that installs the example of a group as a distribution, for one test, and returns its name."""

    def add(group):
        (path,) = [path for path in FILES if path.startswith(f"spmdkit/{plugins.GROUPS[group].folder}/")]
        name = Path(path).stem
        install(monkeypatch, tmp_path, group, name, FILES[path])
        return name

    return add


def test_the_page_has_an_example_of_each():
    found = {path.rpartition("/")[0] for path in FILES}
    assert found == {
        "spmdkit/communication/reducers",
        "spmdkit/communication/sync",
        "spmdkit/cluster/environments",
        "spmdkit/faults/preemption_sources",
        "",
    }
    assert {path for path in FILES if "/" not in path} == {"my_hooks.py", "my_trackers.py", "my_ops.py", "my_syncs.py"}
    assert all(8 <= text.count("\n") <= 45 for text in FILES.values())


# ---- a reducer -------------------------------------------------------------------------------------------------------


def test_the_reducer_loses_nothing(added):
    name = added("reducers")
    made = plugins.make("reducers", name)
    assert made.input_scale == "weighted" and not made.exact
    assert_close(applied_and_owed("replica 2 x fsdp 2 x tensor 2", name), true_sum("replica 2 x fsdp 2 x tensor 2"))


def test_the_reducer_without_loss_is_the_sum(added):
    name = added("reducers")
    lossless = {name: dict(plugins.make("reducers", name).exact_options)}
    own, mesh = two_layers(optax.adam(1e-2, eps=1e-3)), {"mesh": {"data": 4}}
    (found, losses), (expected, theirs) = (train(program(mesh, how, own), 3) for how in (lossless, "sum"))
    np.testing.assert_allclose(losses, theirs, rtol=1e-5)
    assert_close(found.params, expected.params)


def test_the_reducer_sends_what_it_says(added):
    name = added("reducers")
    made = program({"mesh": {"data": 8}}, name, wide(), batch_size=64, data={})
    bill = read_bill(parse(made.compiled.as_text()), made.sizes)
    large = [c for c in bill.collectives if c.bytes > 4096]
    assert {c.op for c in large} == {"all_gather"} and not any(c.in_loop for c in large)
    assert sum(c.bytes for c in large) == pytest.approx(plugins.make("reducers", name).wire(NUM_VALUES, 8), rel=2e-3)


# ---- a sync ----------------------------------------------------------------------------------------------------------


def test_the_sync_without_momentum_is_local_sgd(added):
    name, params, text = added("syncs"), [], ""
    for how in (
        {name: {"every": 2, "momentum": 0.0}},
        {"local_sgd": {"every": 2}},
        {name: {"every": 2, "momentum": 0.5}},
    ):
        made = program_of(two_layers(optax.sgd(0.05)), sync=how, mesh={"data": 2}, batch_size=16, seed=0)
        state, text = made.init(), text or made.compiled.as_text()
        for _, batch in made.batches(1, 6):
            state, _ = made.step(state, batch)
        params.append(jax.tree.map(lambda x: x[0], state.params))
    assert not [c for c in collectives(text, made.sizes) if "data" in c.axes]
    assert_close(params[0], params[1])
    with pytest.raises(AssertionError):
        assert_close(params[2], params[1])


LOOKAHEAD = """
task: my_task.py:task
run_dir: run
steps: 8
batch_size: 8
devices: cpu:2
mesh: {data: 2}
eval: {every_steps: 4}
sync: {my_syncs.py:lookahead: {every: 2, rate: 0.25}}
log: {every_steps: 1, progress: plain}
"""


def test_the_users_sync_equals_a_loop_by_hand(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    task = TASK.replace("x = np.ones((16, 2), np.float32)", "x = np.eye(8, 2, dtype=np.float32)")
    for name, text in {"my_task.py": task, "my_syncs.py": FILES["my_syncs.py"], "run.yaml": LOOKAHEAD}.items():
        (tmp_path / name).write_text(text)
    result = sk.train(tmp_path / "run.yaml")
    rows = [
        row["loss"]
        for row in map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
        if row.get("split") == "eval"
    ]
    slow, groups, losses = np.zeros(2), [np.zeros(2)] * 2, []
    x, batches = np.eye(8, 2), sk.build(sk.load_config(tmp_path / "run.yaml"), devices=jax.devices()[:2]).batches(1, 8)
    for number, batch in batches:
        own = np.split(np.asarray(batch.examples, np.float64), 2)
        groups = [w - 0.1 * 2 * b.T @ (b @ w - 1) / len(b) for w, b in zip(groups, own, strict=True)]
        if number % 2 == 0:
            slow = slow + 0.25 * (sum(groups) / 2 - slow)
            groups = [slow] * 2
        if number % 4 == 0:
            losses.append(((x @ slow - 1) ** 2).mean())
    np.testing.assert_allclose(result.state.params, [slow, slow], rtol=1e-5)
    np.testing.assert_allclose(rows, losses, rtol=1e-5)


# ---- a hook and a tracker
# --------------------------------------------------------------------------------------------------

RUN = """
task: my_task.py:task
run_dir: run
steps: 8
batch_size: 8
devices: cpu:2
mesh: {data: 2}
eval: {every_steps: 2}
hooks: [{my_hooks.py:target: {loss: 100.0}}]
log: {every_steps: 1, progress: plain, trackers: [{my_trackers.py:table: {file: loss.csv}}]}
"""
TASK = """
import jax.numpy as jnp, numpy as np, optax
import spmdkit as sk

x = np.ones((16, 2), np.float32)
loss = lambda w, batch, key: sk.mean((batch @ w - 1) ** 2)
task = sk.Task(lambda key: jnp.zeros(2), loss, optax.sgd(0.1), train_data=x, eval_data=x)
"""


def test_hook_and_tracker_act_in_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    texts = {"my_task.py": TASK, "run.yaml": RUN, **{name: FILES[name] for name in ("my_hooks.py", "my_trackers.py")}}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    result = sk.train(tmp_path / "run.yaml")
    assert int(result.state.step) == 4 and result.run.finished == "the loss is below 100.0 twice in a row"
    rows = list(csv.reader((tmp_path / "run/loss.csv").read_text().splitlines()))
    assert [int(number) for number, name, _ in rows if name == "train/loss"] == [1, 2, 3, 4]
    assert [int(number) for number, name, _ in rows if name == "eval/loss"] == [2, 4]


def test_the_tracker_goes_back(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_trackers.py").write_text(FILES["my_trackers.py"])
    (tmp_path / "run").mkdir()
    from spmdkit.foundation import user_code

    table = user_code.find("my_trackers.py:table", "tracker", tmp_path)
    run = types.SimpleNamespace(directory=tmp_path / "run")
    first = table(run, 0)
    for number in (1, 2, 3):
        first.write("scalars", {"step": number, "loss": 1.0})
    first.rewind(2)
    first.close()
    assert (tmp_path / "run/numbers.csv").read_text().split() == ["1,train/loss,1.0", "2,train/loss,1.0"]
    table(run, 1).close()  # as after a restart
    assert (tmp_path / "run/numbers.csv").read_text().split() == ["1,train/loss,1.0"]


# ---- an environment
# ----------------------------------------------------------------------------------------------------------


def test_the_environment_reads_what_waits_for_it(added):
    name = added("environments")
    waiting = [row for row in starter_environments.ROWS if row.later and row.later[0] == name]
    assert len(waiting) >= 2
    for row in waiting:
        wanted, spec = row.later[1], cluster.detect_cluster(row.env)
        assert (spec.num_processes, spec.process_id) == (wanted.num_processes, wanted.process_id)
        assert spec.coordinator.startswith(wanted.coordinator.removesuffix(LATER_PORT))
        assert [words in note for words, note in zip(wanted.notes, spec.notes, strict=True)] == [True] * len(spec.notes)


def test_the_environment_keeps_the_contract(added, monkeypatch):
    from tests.cluster.test_environments import check_contract

    name = added("environments")
    environment = plugins.find("environments")[name]()
    check_contract(environment, monkeypatch)
    env = starter_environments.SKYPILOT
    assert isinstance(environment.read(env | {"SKYPILOT_NODE_RANK": "2"}), Partial)
    alone = {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.4"}
    assert environment.read(env | alone).spec.coordinator is None


# ---- an op -----------------------------------------------------------------------------------------------------------


def my_ops():
    own = types.ModuleType("my_ops")
    exec(FILES["my_ops.py"], vars(own))
    return own


def test_the_op_sends_what_it_says():
    own, args = my_ops(), (((8, 8, 16), ("batch", "sequence", "mlp")), ((16,), ("mlp",)))
    once = {("all_reduce", "tensor"): 2 * (4 - 1) / 4 * 4 * 8 * 8}
    assert wire(own.rms_norm, own.DIMS, *args, tensor=4) == once
    assert wire(own.rms_norm, own.DIMS, *args, backward=True, tensor=4) == {
        kind: 2 * num_bytes for kind, num_bytes in once.items()
    }


def test_the_op_is_the_same_everywhere():
    own = my_ops()
    args = draw(8, 8, 16), draw(16)
    inside = sk.manual(own.rms_norm, [own.DIMS, ("mlp",)], own.DIMS)
    by_hand = lambda x, scale: x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale
    expected = value_and_grad(by_hand, args, None)
    for fn, record in ((own.rms_norm, None), (own.rms_norm, step(**MESH)), (inside, step(**MESH))):
        assert_close(value_and_grad(fn, args, record), expected)


# ---- a source --------------------------------------------------------------------------------------------------------


def test_the_preemption_source_reports_an_eviction(added, monkeypatch):
    name = added("preemption_sources")
    events = []

    class Azure(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked = (
                self.path.startswith("/metadata/scheduledevents?api-version=") and self.headers["Metadata"] == "true"
            )
            self.send_response(200 if asked else 400)
            self.end_headers()
            self.wfile.write(json.dumps({"Events": events}).encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Azure) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AZURE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
        source = plugins.make("preemption_sources", name)
        assert source.notice() == ""
        events.append({"EventType": "Preempt", "ResourceType": "VirtualMachine"})
        assert source.notice() == "Azure evicts this machine"
        server.shutdown()
