"""The golden file of collectives: a few of its programs compiled again (`make tpu`: all of them), and differences."""

import copy
import subprocess
import sys

import pytest

from tests.plan import golden_collectives as golden

needs_its_versions = pytest.mark.skipif(
    golden.read()["versions"] != golden.versions(), reason="the golden file is of other versions of jax and libtpu"
)


@pytest.mark.tpu
@needs_its_versions
def test_tpu_programs_send_what_the_file_says():
    """Attention as a kernel, and all of data, fsdp and tensor over two slices."""
    names = ["tpu:v5e:2x4/zero2+kernels", f"{golden.TWO_SLICES}/data_fsdp_tensor"]
    ended = subprocess.run([sys.executable, golden.__file__, *names], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("as in the file") == 2


@pytest.mark.parametrize("strategy", ["reducer=hierarchical", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_programs_send_what_the_file_says(strategy):
    expected = golden.read()["targets"]["cpu:8"][strategy]
    ((_, found),) = golden.entries("cpu:8", [strategy])
    assert golden.differences(expected, found) == []
    row = expected["collectives"][0]
    row["count"] += 1
    (line,) = golden.differences(expected, found)
    assert f": was {row['count']} with {row['bytes']} bytes, is {row['count'] - 1} with" in line


def test_every_strategy_and_target_is_in_the_file():
    targets = golden.read()["targets"]
    assert {target: set(found) for target, found in targets.items()} == {
        target: set(golden.strategies_of(target)) for target in golden.TARGETS
    }
    refused = [(t, s) for t, found in targets.items() for s, entry in found.items() if "refused" in entry]
    assert refused == []


def test_attention_is_a_kernel_with_long_sequences():
    targets = golden.read()["targets"]
    calls = {
        (t, s): entry["kernels"] for t, found in targets.items() for s, entry in found.items() if "kernels" in entry
    }
    assert set(calls) == {(t, s + golden.KERNELS) for t in golden.KERNEL_TARGETS for s in golden.STRATEGIES}
    assert all(count >= 3 for count in calls.values()), calls


def test_bytes_of_diloco_on_every_target():
    """Amortised over the 100 steps between two agreements; the most in one step is one all-reduce of the parameters, or
    0.26 of it."""
    for target, found in golden.read()["targets"].items():
        plain = golden._bytes(found["mirrored"])
        for strategy, most in (("diloco", 0.011), ("diloco_int8", 0.003)):
            rows = found[strategy]["collectives"]
            assert golden._bytes(found[strategy]) <= most * plain, (target, strategy)
            assert {row.get("phase") for row in rows if row["bytes"] > 64} == {"agreement"}, (target, strategy)
            assert sum(row["bytes"] for row in rows) <= most * golden.EVERY * plain, (target, strategy)


def test_only_replica_and_data_cross_slices():
    mesh_of = {s: entry["mesh"] for s, entry in golden.read()["targets"][golden.TWO_SLICES].items()}
    by_replica = {"hsdp", *(s for s, more in golden.OVER_SLICES.items() if "mesh.replica=2" in more)}
    assert {s: next(iter(mesh)) for s, mesh in mesh_of.items()} == {
        s: "replica" if s in by_replica else "data" for s in (*golden.STRATEGIES, *golden.SYNCS)
    }


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda e: e["collectives"].pop(0), "none"),
        (lambda e: e["collectives"][0].update(bytes=1), "with 1 bytes"),
        (lambda e: e["collectives"][0].update(axes="tensor"), "over tensor"),
        (lambda e: e["collectives"][0].update(in_loop=True), "is none"),
        (lambda e: e["mesh"].update(data=3), "mesh was"),
        (lambda e: e.update(kernels=3), "kernels was None, is 3"),
        (lambda e: e.update(refused="no"), "is:  no"),
    ],
)
def test_every_change_of_an_entry_is_found(change, said):
    entry = golden.read()["targets"]["cpu:8"]["fsdp"]
    other = copy.deepcopy(entry)
    change(other)
    assert golden.differences(entry, copy.deepcopy(entry)) == []
    assert said in "\n".join(golden.differences(entry, other))


def test_file_and_page_are_what_the_script_writes(tmp_path):
    document = golden.read()
    golden.write(tmp_path / "again.json", document)
    assert (tmp_path / "again.json").read_text() == golden.GOLDEN.read_text()
    assert golden.page(document) == golden.PAGE.read_text()
