"""Compiled programs on the disk: private, whole, one folder for each kind of machine, no more than may be."""

import os
import pwd
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from spmdkit.compat import cache as compat_cache
from spmdkit.plan.machine.calibrate import with_measured
from spmdkit.plan.machine.target import target_of
from spmdkit.program import compile_cache
from spmdkit.program.compile_cache import SUFFIX, Executables, cache_folder, enable_cache, machine

pytestmark = pytest.mark.compiles
OPTIONS = SimpleNamespace(directory=None, min_s=0.0, max_bytes=2**30)


@pytest.fixture
def store(tmp_path):
    return Executables(tmp_path, 1000)


def test_a_stored_program_comes_back(store):
    assert store.get("jit_train_step-6936e5") is None
    store.put("jit_train_step-6936e5", b"code" * 9)
    assert store.get("jit_train_step-6936e5") == b"code" * 9
    assert (store.missed, store.found) == (["train_step"], ["train_step"])
    assert [path.stat().st_mode & 0o777 for path in store.folder.iterdir()] == [0o600]


@pytest.mark.parametrize("damage", [lambda b: b[:40], lambda b: b"", lambda b: b[:50] + b"x" + b[51:]])
def test_a_damaged_entry_is_removed(store, damage):
    store.put("jit_f-1", b"code" * 9)
    (path,) = store.folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert store.get("jit_f-1") is None and not path.exists()
    store.put("jit_f-1", b"code" * 9)
    assert store.get("jit_f-1") == b"code" * 9


def test_the_least_recently_used_entries_are_removed(store):
    (store.folder / ".old.partial").write_bytes(b"x" * 900)
    os.utime(store.folder / ".old.partial", (1, 1))
    for number in range(3):
        store.put(f"jit_f-{number}", bytes(200))
        for path in store.folder.glob(f"*{SUFFIX}"):
            os.utime(path, (path.stat().st_atime - 100, path.stat().st_mtime - 100))
    assert not list(store.folder.glob(".*"))
    store.get("jit_f-0")  # used now
    store.put("jit_f-3", bytes(200))
    store.put("jit_f-4", bytes(200))
    left = {number for number in range(5) if Executables(store.folder, 0).get(f"jit_f-{number}") is not None}
    assert left == {0, 2, 3, 4}


def test_a_disk_that_takes_nothing_is_no_error(store, monkeypatch):
    monkeypatch.setattr(os, "replace", lambda *args: (_ for _ in ()).throw(OSError(28, "full")))
    store.put("jit_f-1", b"code")
    assert store.get("jit_f-1") is None and not list(store.folder.iterdir())


def test_the_folder_is_private_and_per_machine(tmp_path):
    folder, said = cache_folder(None, {"XDG_CACHE_HOME": str(tmp_path)})
    assert folder == tmp_path / "spmdkit" / "compile" / machine() and said == str(folder)
    assert [p.stat().st_mode & 0o777 for p in (folder, folder.parent)] == [0o700, 0o700]
    assert cache_folder(None, {"SPMDKIT_COMPILE_CACHE": str(tmp_path / "c")})[0].parent == tmp_path / "c"
    assert (
        cache_folder(tmp_path / "named", {"SPMDKIT_COMPILE_CACHE": str(tmp_path / "c")})[0].parent == tmp_path / "named"
    )


@pytest.mark.parametrize("home", ["/proc/missing", "/dev/null", "", None])
def test_a_missing_home_directory_is_no_error(home, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("SPMDKIT_RATES", raising=False)
    monkeypatch.setattr(Path, "mkdir", lambda *args, **kwargs: (_ for _ in ()).throw(PermissionError(13, "denied")))
    if home is None:  # a container with a user id that is not in /etc/passwd
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    else:
        monkeypatch.setenv("HOME", home)
    folder, said = cache_folder(None, {})
    assert folder is None and "cannot be created" in said and "compile_cache.directory" in said
    here = target_of(jax.devices())
    assert with_measured(here) == (here, 0.0)


@pytest.mark.parametrize("mode", [0o755, 0o770])
def test_a_folder_open_to_others_is_rejected(tmp_path, mode):
    tmp_path.chmod(mode)
    folder, said = cache_folder(tmp_path, {})
    assert folder is None and f"mode {mode:o}" in said and "chmod 700" in said


def test_links_foreign_folders_and_files_are_rejected(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert "is not a directory" in cache_folder(tmp_path / "link", {})[1]
    (tmp_path / "file").write_text("")
    assert "cannot be created" in cache_folder(tmp_path / "file", {})[1]
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert "belongs to user" in cache_folder(tmp_path / "real", {})[1]


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"SPMDKIT_COMPILE_CACHE": "off"}, "off (SPMDKIT_COMPILE_CACHE=off)"),
        ({"JAX_COMPILATION_CACHE_DIR": "/x"}, "JAX's own, as JAX_COMPILATION_CACHE_DIR says"),
        ({"JAX_ENABLE_COMPILATION_CACHE": "false"}, "JAX's own, as JAX_ENABLE_COMPILATION_CACHE says"),
    ],
)
def test_it_is_switched_off_by_the_environment(environ, said):
    assert cache_folder(None, environ) == (None, said)


def test_cpu_cores_and_jaxlib_identify_a_machine(monkeypatch):
    found = {machine()}
    for module, name, value in (
        (compile_cache, "_cpu", lambda: "avx512f"),
        (compile_cache, "_size_of_jaxlib", lambda: "1"),
        (os, "cpu_count", lambda: 4711),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, value)
            found.add(machine())
    assert len(found) == 4 and all(re.fullmatch("[0-9a-f]{20}", name) for name in found)
    assert machine() == machine() and len(compile_cache._cpu()) > 3


def compiled(x, options=OPTIONS, **environ):
    """Returns what a cache in the environment's folder says of one program, compiled anew."""
    jax.clear_caches()
    with enable_cache(options, Path("/"), environ) as cache:
        jax.jit(lambda x: jnp.tanh(x) * 3, keep_unused=True).lower(x).compile()
    return cache


def test_jax_compiles_once_and_keeps_its_settings(tmp_path):
    config, x = jax.config, jnp.arange(4.0)
    names = ("jax_compilation_cache_dir", "jax_compilation_cache_include_metadata_in_key")
    before = [getattr(config, name) for name in names]
    # From one line: that of the caller is part of a program's key.
    first, again = (compiled(x, SPMDKIT_COMPILE_CACHE=str(tmp_path)) for _ in range(2))
    assert first.programs()["compiled"] == again.programs()["from_cache"] == ["_lambda"]
    assert first.programs()["from_cache"] == again.programs()["compiled"] == []
    assert [getattr(config, name) for name in names] == before and not compat_cache.has_compilation_cache()


def test_a_program_that_compiles_quickly_is_not_kept(tmp_path):
    quick = SimpleNamespace(directory=str(tmp_path), min_s=1e3, max_bytes=2**30)
    assert compiled(jnp.arange(4.0), quick).store.missed == ["_lambda"]
    assert not list(tmp_path.rglob(f"*{SUFFIX}"))


def test_a_cached_program_calls_its_own_callback(tmp_path):
    called, x = [], jnp.float32(3)
    for who in ("first", "again"):
        jax.clear_caches()
        with enable_cache(OPTIONS, Path("/"), {"SPMDKIT_COMPILE_CACHE": str(tmp_path)}) as cache:
            jax.jit(lambda x, who=who: jax.debug.callback(lambda y: called.append((who, float(y))), x))(x)
            jax.effects_barrier()
    assert called == [("first", 3.0), ("again", 3.0)]
    keeps = not jax.__version__.startswith("0.10.")  # which compiles it again
    assert cache.programs()["from_cache" if keeps else "compiled"] == ["_lambda"]
    assert bool(list(tmp_path.rglob(f"*{SUFFIX}"))) == keeps


def test_a_cache_configured_in_jax_stays(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
    try:
        with enable_cache(OPTIONS, tmp_path, {"SPMDKIT_COMPILE_CACHE": str(tmp_path / "ours")}) as cache:
            assert cache.store is None and cache.description.startswith("JAX's own") and not cache.is_refused
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
    with enable_cache(None, tmp_path, {}) as cache:
        assert cache.description == "off: compile_cache is null" and cache.programs() == {"cache": cache.description}


def test_every_process_writes(tmp_path, monkeypatch):
    from jax._src import distributed

    monkeypatch.setattr(distributed.global_state, "process_id", 1)
    compiled(jnp.arange(4.0), SPMDKIT_COMPILE_CACHE=str(tmp_path))
    assert list(tmp_path.rglob(f"*{SUFFIX}"))
