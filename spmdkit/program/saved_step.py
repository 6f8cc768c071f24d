"""`save_step`, `load_step`: the compiled step in a file, from `plan --save-compiled DIR` to `train` on that machine.

JAX serializes executables with pickle, and unpickling runs code. A file is therefore read only from a folder that the
user owns and no one else can access (0700), as in the compile cache, and only after its digest is checked. The facts of
the step are JSON before the pickle: program, versions, devices and compiler options. If one differs, the step is
compiled, and one line names what differs.

    magic, digest of the rest (32 bytes), length of the facts (8 bytes), facts (JSON), pickle of JAX

The trees of arguments and results are not in the file: they are those of the traced step.

CPU: the facts contain the kind of machine (compile_cache.machine). TPU: an executable that was compiled for a topology
has the facts of that slice. GPU: a plan compiles without autotuning in another process, and is not saved.
Source: docs.jax.dev/en/latest/aot.html; jax/experimental/serialize_executable.py (0.10.2).
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable

from spmdkit.compat.cache import without_compilation_cache
from spmdkit.errors import ConfigError
from spmdkit.program import compile_cache, compiler
from spmdkit.program.program import Program

NAME = "train_step.compiled"
_MAGIC = b"spmdkit step 1\n"
_DIGEST_BYTES, _LENGTH_BYTES = 32, 8


def make_folder(folder: Path) -> None:
    """Creates the folder of `save_step`, if it does not exist.

    Raises:
        ConfigError: it cannot be created, or is open to others.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=compile_cache.FOLDER_MODE)
        why = compile_cache.not_private(folder)
    except OSError as error:
        raise ConfigError(f"--save-compiled: {folder} cannot be created ({error.strerror}). Name another.") from error
    if why:
        raise ConfigError(
            f"--save-compiled: {folder} {why}. Its contents are executed, so that it must be yours alone. Run chmod "
            f"700 {folder}, or name another folder."
        )


def save_step(program: Program, folder: Path) -> Path:
    """Compiles the step of a program, and writes it to a folder. Returns the file. A program that is compiled already
    must not be from a cache (`without_compilation_cache`).

    Raises:
        ConfigError: the folder is open to others or cannot be written, or JAX cannot serialize the step.
    """
    make_folder(folder)
    facts = json.dumps(_facts(program)).encode()
    with without_compilation_cache():
        compiled = program.compiled
    try:
        pickled = serialize_executable.serialize(compiled)[0]
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        raise ConfigError(
            f"--save-compiled: JAX cannot serialize this step ({str(error).splitlines()[0]}). Leave it out; train "
            "compiles the step."
        ) from error
    content = len(facts).to_bytes(_LENGTH_BYTES, "big") + facts + pickled
    temporary = folder / f".{secrets.token_hex(8)}.partial"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, compile_cache.FILE_MODE)
        with os.fdopen(descriptor, "wb") as file:
            file.write(_MAGIC + _digest(content) + content)
        os.replace(temporary, folder / NAME)
    except OSError as error:
        raise ConfigError(f"--save-compiled: {folder} cannot be written ({error.strerror}). Name another.") from error
    finally:
        temporary.unlink(missing_ok=True)
    return folder / NAME


def load_step(program: Program, folder: Path) -> tuple[jax.stages.Compiled | None, str]:
    """Returns (the saved step of a program, a line about it), or (None, why it is not used)."""
    path = folder / NAME
    try:
        why = compile_cache.not_private(folder)
        content = b"" if why else path.read_bytes()
    except OSError as error:
        return None, f"{path} cannot be read ({error.strerror}); the step is compiled"
    if why:
        return None, f"{folder} {why}, so that it is not read; make it private (chmod 700). The step is compiled"
    begin = len(_MAGIC) + _DIGEST_BYTES
    if content[: len(_MAGIC)] != _MAGIC or content[len(_MAGIC) : begin] != _digest(content[begin:]):
        return None, f"{path} is damaged; the step is compiled"
    end = begin + _LENGTH_BYTES + int.from_bytes(content[begin : begin + _LENGTH_BYTES], "big")
    saved, own = json.loads(content[begin + _LENGTH_BYTES : end]), _facts(program)
    if differences := [_difference(name, saved, own) for name in own | saved if saved.get(name) != own.get(name)]:
        return None, f"{path} is of another step ({'; '.join(differences)}); the step is compiled"
    devices = list(program.mesh.devices.flat)
    trees = jax.tree.structure(program.lowered.args_info), program.lowered.out_tree
    try:
        compiled = serialize_executable.deserialize_and_load(content[end:], *trees, devices[0].client, devices)
    except Exception as error:  # noqa: BLE001 - any error of a runtime: the step is compiled in its place
        return None, f"{path} cannot be loaded ({str(error).splitlines()[0][:200]}); the step is compiled"
    vars(program).pop("lowered", None)  # releases its memory, as a compilation does
    return compiled, f"the compiled step is read from {path}"


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _facts(program: Program) -> dict[str, Any]:
    """Returns what has to be equal for a compiled step to be that of a program, as JSON."""
    devices, config = list(program.mesh.devices.flat), program.config
    first = devices[0]
    options = compiler.options(devices, config.compiler_options, config.deterministic)
    places = [[d.id, d.process_index, *map(int, getattr(d, "coords", ()) or ())] for d in devices]
    return {
        "program": hashlib.blake2b(program.lowered.as_text().encode(), digest_size=20).hexdigest(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "compiler": _compiler_version(first),
        "device": first.device_kind,
        "devices": len(devices),
        "topology": hashlib.blake2b(json.dumps(places).encode(), digest_size=20).hexdigest(),
        "compiler options": {name: str(value) for name, value in sorted(options.items())},
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }


def _compiler_version(device: Any) -> str:
    """Returns the kind of this machine for a CPU, of which XLA compiles for the features; otherwise the version of the
    compiler."""
    if device.platform == "cpu":
        return compile_cache.machine()
    return f"libtpu {metadata.version('libtpu')}" if device.platform == "tpu" else str(device.client.platform_version)


def _difference(name: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    then, now = (str(facts.get(name)).splitlines()[0][:60] for facts in (saved, own))
    return f"{name} {then}, here {now}"
