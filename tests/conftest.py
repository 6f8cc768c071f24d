"""Eight fake CPU devices, strict dtype promotion, programs that compile in a fifth of the time, and a table of
seconds. That no test hangs for ever is set in pyproject.toml."""

import gc
import importlib.util
import os
import shutil
import signal
import sys
import tempfile

from tests.support.environment import QUICK_XLA

gc.disable()  # until all tests are collected: imports leave no garbage
MEMORY, MEMORY_BYTES = "/dev/shm", 4 << 30
if "TMPDIR" not in os.environ and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > MEMORY_BYTES:
    os.environ["TMPDIR"] = MEMORY  # a file that is synced and removed takes 8 ms on a virtual disk
    tempfile.tempdir = None  # has been read
os.environ["JAX_PLATFORMS"] = os.environ.get("SPMDKIT_TEST_PLATFORMS", "cpu")  # benchmarks/gpu.py: cuda,cpu
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("NPROC", str(max(2 * 8, os.cpu_count() or 1)))  # see spmdkit/cluster/join.py
if QUICK_XLA:  # read once, when jax is imported, by this process and those it starts
    os.environ.setdefault("XLA_FLAGS", QUICK_XLA)
os.environ.setdefault("SPMDKIT_COMPILE_CACHE", "off")  # a test compiles what it says it does
os.environ.setdefault("SPMDKIT_ALLOCATOR", "system")  # what a run sets would hold for all tests after it

import hypothesis
import jax
import pytest
from hypothesis.internal.conjecture import providers

from spmdkit.faults.signals import SIGNALS
from tests.support import compile_cache
from tests.support.buckets import PACKAGES as SERVERS
from tests.support.forks import ADDRESS, Forks, Server
from tests.support.forms import mark_slow_forms
from tests.support.optax_promotion import let_optax_promote
from tests.support.seconds import Seconds
from tests.support.warm_processes import WarmProcesses

jax.config.update("jax_num_cpu_devices", 8)
_no_constants = providers.Constants()
# The numbers of all imported sources: 2 s in each worker, and an edit of any source would change the examples.
providers._get_local_constants = lambda: _no_constants
let_optax_promote()

for name, examples in (("default", 50), ("thorough", 1000)):
    hypothesis.settings.register_profile(
        name,
        derandomize=True,
        deadline=None,
        database=None,
        max_examples=examples,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],  # on a busy machine
    )


def pytest_configure(config):
    config.pluginmanager.register(Seconds(config))
    config.pluginmanager.register(compile_cache.CompileCache())
    if getattr(config.option, "numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        server = Server().__enter__()
        os.environ[ADDRESS] = server.address
        config.add_cleanup(lambda: (os.environ.pop(ADDRESS), server.__exit__()))
    hypothesis.settings.load_profile("thorough" if config.option.markexpr == "slow" else "default")


def pytest_runtest_setup(item):
    """What needs a package of more than 100 MB runs where that is installed: in the environment of `make extras`."""
    if item.get_closest_marker("tpu") and importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: `make extras` (x86 only)")
    if item.get_closest_marker("gpu") and importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("XLA's GPU compiler is not installed: `make extras` (x86 only)")
    if item.get_closest_marker("storage") and (missing := [x for x in SERVERS if importlib.util.find_spec(x) is None]):
        pytest.skip(f"{', '.join(missing)}: not installed: `make extras` (clients and local servers of object storage)")
    if item.get_closest_marker("ray") and importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: `make extras`")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks the slow forms. Folders with long files come first, so that all workers end at the same time."""
    mark_slow_forms(items)
    first = ("faults", "horovod", "tools", "system", "launch", "communication", "step", "ops", "verify", "run")
    place = {name: i for i, name in enumerate(first)}
    items.sort(key=lambda item: place.get(item.nodeid.split("/")[1], len(first)))


def pytest_collection_finish():
    """What is imported by now stays: the collector need not walk it, nor walk what jax keeps every 700 objects.

    A test may write a module twice in a second. Python would load the bytecode of the first one if both have one size.
    """
    sys.dont_write_bytecode = True
    gc.collect()
    gc.freeze()
    gc.set_threshold(500_000, 20, 100)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure():
    """One collection of what the tests leave. pytest and the interpreter would each walk all of it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def compile_quickly(request):
    """LLVM's expensive passes off, which change no text of a program (tests/core/test_flags_of_the_suite.py), and the
    lines of the source, but for modules with the mark `locations`. The lines take a sixth of the time of a test that
    lowers many programs."""
    lines = jax.config.jax_traceback_in_locations_limit
    without_lines = request.node.get_closest_marker("locations") is None
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_traceback_in_locations_limit", 0 if without_lines else lines)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.config.update("jax_traceback_in_locations_limit", lines)


@pytest.fixture(autouse=True, scope="module")
def compile_once(request):
    """The session's compile cache, but for modules with the mark `compiles`, which count compilations or look at what
    the compiler itself leaves."""
    compile_cache.use(request.node.get_closest_marker("compiles") is None)
    yield
    compile_cache.use(False)


@pytest.fixture(autouse=True, scope="module")
def strict_promotion(request):
    """No implicit change of a dtype, but in modules with the mark `promotes`, which says whose code there needs it."""
    promotes = request.node.get_closest_marker("promotes") is not None
    jax.config.update("jax_numpy_dtype_promotion", "standard" if promotes else "strict")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "standard")


@pytest.fixture(scope="session")
def forks():
    """Starts real processes in a tenth of the time."""
    with Forks() as started:
        yield started


@pytest.fixture(scope="session")
def warm():
    """The folder with a `python` and an `spmdkit` that start in a tenth of the time."""
    with WarmProcesses() as started:
        yield started.bin


@pytest.fixture
def forked_python(warm, monkeypatch):
    """Forks what a test starts with `sys.executable -m`."""
    monkeypatch.setattr(sys, "executable", str(warm / "python"))


@pytest.fixture(autouse=True)
def signals_as_before():
    """A command that fails in this process ignores what asks it to stop, and what the tests start would inherit
    that."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)
