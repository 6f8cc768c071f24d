"""`in_compiler_process`: calls a function in a separate process that loads XLA's GPU compiler.

The process that plans does not load JAX's CUDA plugin: the plugin registers itself in JAX, reads flags of XLA, and may
crash. Function and arguments are pickled, the result is JSON. What the function prints goes to standard error.

The compiler emits PTX, runs NVIDIA's assembler `ptxas` and links NVIDIA's library `libdevice`. Both belong to CUDA, and
only a program that runs needs their results: here the assembler is a script and the library is empty. The compiled
program, as text, is the same with those of CUDA 13.0 (jax 0.10.2, a GPT on 8 H100, 2026-11-27).
"""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle

from spmdkit.errors import ConfigError, ExitCode, UserCodeError
from spmdkit.faults.exit_handler import describe
from spmdkit.foundation.constants import GPU_COMPILER
from spmdkit.foundation.formatting import visible
from spmdkit.launch.process import start
from spmdkit.plan.machine.gpu_devices import check_version
from spmdkit.plan.machine.target import Target, open_target

_LOG = re.compile(r"[IWE]\d{4} \d\d:|WARNING: All log messages before absl")
"""A line of XLA's log."""
_CRASH = re.compile(r"F\d{4} |\*\*\* |PC: @|Fatal Python error")
"""First line of a crash of C++ code; its stack trace follows."""


_PTXAS = """#!/bin/sh
[ "$1" = --version ] && echo "release 13.0, V13.0.88"
while [ $# -gt 1 ]; do [ "$1" = -o ] && echo > "$2"; shift; done
exit 0
"""
"""Writes one empty line as the assembled program."""


def compiler_environment(folder: Path) -> dict[str, str]:
    """Returns the environment of a process that loads the GPU compiler. `folder` exists until the process ends."""
    assembler, library = folder / "bin" / "ptxas", folder / "nvvm" / "libdevice" / "libdevice.10.bc"
    for file, text in ((assembler, _PTXAS), (library, "; no functions\n")):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assembler.chmod(0o755)
    # There is no GPU on which kernels could be measured.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0 --xla_gpu_cuda_data_dir={folder}".strip()
    own = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "XLA_FLAGS": flags, GPU_COMPILER: "1"}
    return {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, **own}


def in_compiler_process(function: Callable[..., Mapping[str, Any]], target: Target, *arguments: Any) -> dict[str, Any]:
    """Returns `function(opened target, *arguments)`, called in a process that loads the GPU compiler.

    Raises:
        ConfigError: as the function does; the compiler has another version than jax, or crashed; the function cannot be
            pickled.
        UserCodeError: a function of the user raised.
    """
    check_version()
    with tempfile.TemporaryDirectory(prefix="spmdkit-plan-") as folder:
        try:
            call = cloudpickle.dumps((function, replace(target, devices=()), arguments))
        except Exception as error:
            raise ConfigError(
                f"the step for target {target.name} cannot be sent to the process of the GPU compiler "
                f"({type(error).__name__}: {error}). make(devices) must not refer to open files, locks or arrays of a "
                "device. Put it into a file: spmdkit plan train.py:make."
            ) from error
        Path(folder, "call").write_bytes(pickle.dumps(sys.path) + call)
        command = [sys.executable, "-m", "spmdkit.plan.machine.compiler_process", folder]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with start(command, compiler_environment(Path(folder)), **pipes, errors="replace") as process:
            try:
                lines = _forward(process)
            except BaseException:
                process.kill()
                raise
        result = Path(folder, "result")
        if not result.exists():
            raise _crash(process, target, lines)
        found: dict[str, Any] = json.loads(result.read_text())
    if "error" in found:
        code, message = found["error"]
        raise (ConfigError if code == ExitCode.CONFIG else UserCodeError)(message)
    value: dict[str, Any] = found["value"]
    return value


def _forward(process: subprocess.Popen[str]) -> list[str]:
    """Prints the lines of a process until it ends, except for XLA's log and the stack trace of a crash; returns all."""
    lines: list[str] = []
    crashed = False
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.strip())
        crashed = crashed or _CRASH.match(line) is not None
        if not crashed and not _LOG.match(line):
            print(visible(line.rstrip("\n")), file=sys.stderr, flush=True)
    return lines


def _crash(process: subprocess.Popen[str], target: Target, lines: list[str]) -> ConfigError:
    reason = next((line for line in lines if _CRASH.match(line)), lines[-1] if lines else "no output")
    return ConfigError(
        f"the GPU compiler of target {target.name} crashed (code {process.returncode}): {reason[:400]}. It has to "
        "compile the step. Try other compiler_options or another mesh; cpu:N compiles the step for as many CPU devices."
    )


def main(folder: Path) -> None:
    """Runs the call in `folder` and writes the result."""
    with (folder / "call").open("rb") as file:
        sys.path[:] = pickle.load(file)
        try:
            function, target, arguments = cloudpickle.load(file)
            found: dict[str, Any] = {"value": function(open_target(target), *arguments)}
        except BaseException as error:  # noqa: BLE001 - reported by the process that waits
            found = {"error": describe(error)}
    (folder / "result.new").write_text(json.dumps(found))
    (folder / "result.new").rename(folder / "result")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # the compiler's threads and destructors are of no use
