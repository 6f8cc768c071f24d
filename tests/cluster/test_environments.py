"""The contract of an environment, for every file of cluster/environments, and a table of environments that real
starters set."""

import os
from types import MappingProxyType

import pytest

from spmdkit.cluster import ClusterSpec, detect_cluster
from spmdkit.cluster.detection import resolve
from spmdkit.cluster.environments import all_environments
from spmdkit.cluster.environments.base import LEVELS, DetectedCluster, Partial
from spmdkit.cluster.environments.slurm import first_host
from spmdkit.cluster.spec import Names, split_address
from spmdkit.config import parse_config
from spmdkit.errors import ConfigError
from tests.cluster.starter_environments import LATER_PORT, ROWS, Refused

ENVIRONMENTS = all_environments()


def expected(row):
    return row.later[1] if row.later and row.later[0] in ENVIRONMENTS else row.reads


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_detection_matches_the_table(row):
    wanted = expected(row)
    if isinstance(wanted, Refused):
        with pytest.raises(ConfigError) as caught:
            detect_cluster(row.env)
        assert all(part in str(caught.value) for part in wanted.words), caught.value
        assert caught.value.exit_code == 78
        return
    spec = detect_cluster(row.env)
    assert (spec.num_processes, spec.process_id) == (wanted.num_processes, wanted.process_id)
    if wanted.coordinator and wanted.coordinator.endswith(LATER_PORT):
        assert spec.coordinator.startswith(wanted.coordinator.removesuffix(LATER_PORT))
    else:
        assert spec.coordinator == wanted.coordinator
    if wanted.by:
        assert spec.names == ENVIRONMENTS[wanted.by].NAMES
        assert spec.found_by.startswith(f"{wanted.by} (") and ", since " in spec.found_by
    assert len(spec.notes) == len(wanted.notes), spec.notes
    for note, words in zip(spec.notes, wanted.notes, strict=True):
        assert words in note and "\n" not in note
    for name, value in wanted.extra.items():
        assert getattr(spec, name) == value


def test_table_covers_every_environment():
    places = [expected(row) for row in ROWS if not isinstance(expected(row), Refused)]
    decides = {place.by for place in places} - {None}
    assert decides | {"ray"} == set(ENVIRONMENTS), "Ray gives a process no rank: its rows are lines in the log"
    assert any("Ray" in note for place in places for note in place.notes)
    assert len({row.name for row in ROWS}) == len(ROWS)


def check_contract(environment, monkeypatch):
    """Fails unless a module fulfils the contract of base.py on every row of the table."""
    assert environment.__doc__ and isinstance(environment.NAMES, Names)
    assert environment.read({}) is None
    for row in ROWS:
        answer = environment.read(MappingProxyType(row.env))
        with monkeypatch.context() as patched:
            patched.setattr(os, "environ", {key: "7" for one in ROWS for key in one.env})
            assert environment.read(dict(row.env)) == answer, (
                f"{row.name}: read is not a function of its argument alone"
            )
        if isinstance(answer, DetectedCluster):
            spec = answer.spec
            assert answer.level in LEVELS and spec.names == environment.NAMES
            assert 0 <= spec.process_id < spec.num_processes
            assert (spec.coordinator is None) == (spec.num_processes == 1)
            if spec.coordinator:
                split_address(spec.coordinator)
            assert spec.num_processes == 1 or not answer.repair or answer.repair.endswith(".") or "..." in answer.repair
            others = {k: v for k, v in row.env.items() if k not in environment.NAMES}
            assert not isinstance(environment.read(others), DetectedCluster), (
                f"{row.name}: it reads what it does not name"
            )
            plain = ClusterSpec(spec.coordinator, spec.num_processes, spec.process_id, names=spec.names)
            assert spec == plain, "devices, timeout and notes are not an environment's"
        elif isinstance(answer, Partial):
            assert answer.level in LEVELS and answer.why and answer.why[-1] != "." and answer.repair[-1] == "."
        else:
            assert answer is None


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_environment_contract(name, monkeypatch):
    check_contract(ENVIRONMENTS[name], monkeypatch)


def found(num, process, level="starter", name="X", agents=None):
    names = Names(f"{name}_SIZE", f"{name}_RANK", f"{name}_ADDR")
    return DetectedCluster(ClusterSpec("h:1" if num > 1 else None, num, process, names=names), level, agents)


def test_highest_level_wins():
    spec = resolve(
        {"a": found(4, 1, "allocation", "A"), "b": found(2, 0, "starter", "B"), "c": found(8, 5, "explicit", "C")}
    )
    assert (spec.num_processes, spec.process_id) == (8, 5)
    assert spec.notes == (
        "a is not used (A_SIZE=4, A_RANK=1): c has C_SIZE=8, C_RANK=5",
        "b is not used (B_SIZE=2, B_RANK=0): c has C_SIZE=8, C_RANK=5",
    )


@pytest.mark.parametrize("other", [(4, 2), (2, 1)])
def test_disagreement_within_a_level_is_an_error(other):
    with pytest.raises(ConfigError) as caught:
        resolve({"a": found(4, 1, name="A"), "b": found(*other, name="B")})
    for words in ("A_SIZE=4, A_RANK=1", f"B_SIZE={other[0]}, B_RANK={other[1]}", "{environment: a}", "unset"):
        assert words in str(caught.value)
    assert resolve({"a": found(4, 1, name="A"), "b": found(4, 1, name="B")}).process_id == 1


def test_starter_of_agents_is_not_used():
    spec = resolve({"a": found(2, 1, name="A"), "b": found(8, 6, name="B", agents=2)})
    assert (spec.num_processes, spec.process_id) == (8, 6)
    assert spec.notes == ("a is not used (A_SIZE=2, A_RANK=1): b has B_SIZE=8, B_RANK=6",)
    with pytest.raises(ConfigError, match="disagree"):
        resolve({"a": found(3, 1, name="A"), "b": found(8, 6, name="B", agents=2)})


def test_requested_number_must_match_the_detected_one():
    asked = Partial("4 are requested", "Set the ranks.", "explicit", 4)
    assert resolve({"a": found(4, 1), "ours": asked}).process_id == 1
    with pytest.raises(ConfigError, match=r"4 are requested, but a has started 2 .*Or let a set the number"):
        resolve({"a": found(2, 1), "ours": asked})


def test_an_allocation_alone_is_one_process():
    lent = Partial("a job of 4 tasks without a step", "Start it with srun.", "allocation", 4)
    assert resolve({"a": lent}).notes == ("one process: a job of 4 tasks without a step. Start it with srun.",)
    with pytest.raises(ConfigError, match=r"half. Fix it."):
        resolve({"a": Partial("half", "Fix it.", "starter")})
    with pytest.raises(ConfigError, match=r"4 are requested. Set the ranks. a job of 4 tasks .*srun"):
        resolve({"a": lent, "ours": Partial("4 are requested", "Set the ranks.", "explicit", 4)})


def test_config_names_an_environment_or_none():
    env = next(row.env for row in ROWS if row.name == "spmdkit launch -n 4")
    alone = detect_cluster(env, "none")
    assert alone.num_processes == 1
    assert "cluster.environment is none" in alone.notes[0]
    assert detect_cluster(env, "spmdkit") == detect_cluster(env)
    with pytest.raises(ConfigError, match=r"cluster.environment is spmdkit, but none of its variables"):
        detect_cluster({}, "spmdkit")
    with pytest.raises(ConfigError, match="'slrum'"):
        detect_cluster({}, "slrum")


def test_config_accepts_every_environment():
    for name in ("auto", "none", *ENVIRONMENTS):
        assert parse_config({"task": "a.py:t", "cluster": {"environment": name}}).cluster.environment == name
    with pytest.raises(ConfigError) as caught:
        parse_config({"task": "a.py:t", "cluster": {"environment": "spmdkti"}})
    assert "cluster.environment: should be auto, none, " in str(caught.value)
    assert "Did you mean 'spmdkit'?" in str(caught.value)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("vm", "vm"),
        ("node001,host2", "node001"),
        ("node[001-015],host2", "node001"),
        ("node[001,007-015],host2", "node001"),
        ("a-b[3-9].c-d,x", "a-b3.c-d"),
        ("rack[1-2]node[3,5]", "rack1node3"),
        ("10.0.0.7,10.0.0.8", "10.0.0.7"),
    ],
)
def test_first_host_of_a_slurm_list(hosts, first):
    assert first_host(hosts) == first
