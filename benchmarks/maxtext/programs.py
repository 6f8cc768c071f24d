"""Compiled steps as files, for the comparison with MaxText: written in the environment of `requirements.txt` by
`compile_step.py` (MaxText) and `compile_ours.py` (spmdkit), read by one reader, that of `plan`.

    step.txt     the compiled program
    step.json    mesh, positions of the devices, memory, seconds of the compilation, versions
"""

import json
import os
import re
import tempfile
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

NAMES = ("jax", "libtpu", "jax-cuda13-pjrt", "maxtext")
"""Packages with versions in the summary."""
_folders = []


def prepare():
    """Sets the environment of a process that compiles for devices that are not there; before JAX is imported."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    from spmdkit.plan.machine.compiler_process import compiler_environment

    _folders.append(tempfile.TemporaryDirectory(prefix="bench-maxtext-"))  # exists until the process ends
    os.environ |= compiler_environment(Path(_folders[-1].name))


class Stopwatch:
    """Wall and processor time since it was created."""

    def __init__(self):
        self._start_s, self._cpu_s = time.time(), time.process_time()

    def seconds(self):
        """Returns the fields of the summary."""
        return {
            "wall_s": round(time.time() - self._start_s, 1),
            "cpu_s": round(time.process_time() - self._cpu_s, 1),
        }


def save(out, compiled, mesh, **fields):
    """Writes a compiled step and its summary into the folder `out`; returns the summary."""
    memory, flat = compiled.memory_analysis(), list(mesh.devices.flat)
    summary = {
        "axes": {axis: size for axis, size in mesh.shape.items() if size > 1},
        "coords": [list(getattr(device, "coords", ())) for device in flat],
        "slices": [getattr(device, "slice_index", 0) or 0 for device in flat],
        "memory": {name: getattr(memory, name) for name in dir(memory) if name.endswith("bytes")},
        "versions": {name: metadata.version(name) for name in NAMES},
        **fields,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "step.txt").write_text(compiled.as_text())
    (out / "step.json").write_text(json.dumps(summary))
    return summary


def last_error(output):
    """Returns the last line of an exception in the output of a process."""
    lines = [line for line in output.splitlines() if re.match(r"[\w.]*(Error|Exception|EXHAUSTED)\b", line)]
    return (lines or output.splitlines() or ["no output"])[-1].strip()[:300]


def parsed(summary, text):
    """Returns (module, bill, devices) of a saved step."""
    from spmdkit.plan.collectives_bill import read_bill
    from spmdkit.plan.hlo.text import parse

    devices = [
        SimpleNamespace(coords=tuple(coords), slice_index=part, process_index=0, id=n)
        for n, (coords, part) in enumerate(zip(summary["coords"], summary["slices"], strict=True))
    ]
    module = parse(text)
    return module, read_bill(module, summary["axes"], ()), devices


def attention_of(module):
    """Returns the kind of attention in a parsed program: splash, cudnn, or products (no kernel)."""
    calls = [i for c in module.computations.values() for i in c.instructions if i.opcode == "custom-call"]
    targets = {match[1] for i in calls if (match := re.search(r'custom_call_target="([^"]*)"', i.attributes))}
    if any(target.startswith("__cudnn$fmha") for target in targets):
        return "cudnn"
    return "splash" if any("splash" in i.name or "splash" in i.attributes for i in calls) else "products"
