"""The compile cache of the tests: the ranks of a job compile each program once."""

import pytest

from tests.support.forks import Process

SCRIPT = """
import os
import jax
import jax.numpy as jnp
import numpy as np
from spmdkit.cluster import detect_cluster, join

counts = {"hits": 0, "misses": 0}
def count(event, **_):
    for name in counts:
        counts[name] += event == f"/jax/compilation_cache/cache_{name}"
jax.monitoring.register_event_listener(count)
join(detect_cluster(dict(os.environ)), "cpu:2")
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
x = jax.make_array_from_process_local_data(jax.NamedSharding(mesh, jax.P("data")), np.ones(1, np.float32), (2,))
assert float(jax.jit(lambda x: (x * 1234.5).sum())(x)) == 2469
assert float(jax.jit(lambda x: x * 2345.5)(np.float32(2))) == 4691  # on a device of its own
print(f"{counts['hits']} hits, {counts['misses']} misses")
"""


@pytest.mark.processes
def test_ranks_compile_each_program_once(tmp_path, forks):
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = forks.together([Process([str(tmp_path / "script.py")], tmp_path)] * 2)
    assert [process.code for process in ended] == [0, 0], ended
    hits, misses = zip(*[(int(words[-4]), int(words[-2])) for words in (e.output.split() for e in ended)], strict=True)
    assert sum(misses) == sum(hits) == 2, ended
