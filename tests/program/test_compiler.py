"""The options that go to the compiler: spmdkit's own for a platform, the config's over them, and what is refused."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError
from spmdkit.program import compiler
from spmdkit.step import trace_context
from tests.support.core_models import regression
from tests.support.core_runs import program_of

CPU, V5E, V5P = (
    [SimpleNamespace(platform=platform, device_kind=kind)]
    for platform, kind in (("cpu", "cpu"), ("tpu", "TPU v5 lite"), ("tpu", "TPU v5"))
)
OURS = "xla_tpu_enable_sparse_core_collective_offload_all_gather"


def test_config_overrides_the_options_of_a_platform():
    assert compiler.options(CPU, {}) == {}
    assert compiler.options(V5P, {})[OURS] is True
    assert OURS not in compiler.options(V5E, {}) != {}
    assert compiler.options(V5P, {OURS: False, "xla_other": 3})[OURS] is False
    assert OURS not in compiler.options(V5P, {OURS: None})


def test_deterministic_sets_flags_of_gpus_only():
    gpu = [SimpleNamespace(platform="gpu", device_kind="NVIDIA H100")]
    assert compiler.options(gpu, {}) == {}
    assert compiler.options(gpu, {}, True) == {
        "xla_gpu_deterministic_ops": True,
        "xla_gpu_exclude_nondeterministic_ops": True,
    }
    assert all(compiler.options(device, {}, True) == compiler.options(device, {}) for device in (CPU, V5P))


def test_all_programs_get_the_options_of_steps(monkeypatch):
    options, given, own = {"xla_cpu_enable_fast_math": False}, [], jax.stages.Lowered.compile
    monkeypatch.setattr(compiler, "own_options", lambda _, deterministic: options if deterministic else {})
    monkeypatch.setattr(
        jax.stages.Lowered, "compile", lambda self, compiler_options: given.append(compiler_options) or own(self)
    )
    program = program_of(regression(), deterministic=True)
    state = program.init()
    assert given == [options]
    program.eval(state)
    assert program.compiled and given == [options] * 3


def test_deterministic_refuses_what_cannot_be():
    asked = {"task": "t.py:t", "deterministic": True}
    with pytest.raises(ConfigError, match=r"implementation: is cudnn, with a gradient that sums in another order"):
        sk.Config(**asked, attention={"implementation": "cudnn"})
    with pytest.raises(ConfigError, match="xla_gpu_deterministic_ops: is false, and deterministic is true"):
        sk.Config(**asked, compiler_options={"xla_gpu_deterministic_ops": False})
    q = jnp.ones((1, 4, 2, 8))
    chosen = trace_context.Context().with_options(deterministic=True)
    with (
        trace_context.tracing(chosen),
        pytest.raises(ConfigError, match="cudnn, but its gradient adds in another order"),
    ):
        sk.attention(q, q, q, implementation="cudnn")

    def lowered(options):
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: scatter has no deterministic implementation")

    gpu = [SimpleNamespace(platform="gpu", device_kind="NVIDIA H100")]
    step = SimpleNamespace(compile=lambda compiler_options: lowered(compiler_options))
    with pytest.raises(
        ConfigError, match="deterministic is true, and the compiler of gpu reports: UNIMPLEMENTED: scatter"
    ):
        compiler.compile(step, gpu, {}, True)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"xla_cpu_enable_fast_maths": True}, r"compiler of cpu reports: .*No such compile option.* Remove it"),
        ({"xla_cpu_enable_fast_math": "maybe"}, "'maybe' is not a valid bool value"),
        ({OURS + "s": None}, f"has no effect. null removes an option .* Did you mean '{OURS}'?"),
        ({"xla_x": [1]}, "should be a mapping .*to numbers, text, true, false or null"),
    ],
)
def test_an_option_that_cannot_work_is_refused(own, message):
    with pytest.raises(ConfigError, match=message):
        _ = program_of(regression(), compiler_options=own).compiled
