"""Compiles MaxText's own train step for a machine that is not there, and saves the text. Runs in the environment of
`requirements.txt` (Python 3.12), with the repository on PYTHONPATH:

    python benchmarks/maxtext/compile_step.py OUT TARGET [--flags FLAGS] NAME=VALUE...

    OUT        the folder of `step.txt` (the compiled program) and `step.json` (mesh, positions of the devices, memory,
               seconds of the compilation, flags that this compiler does not know)
    TARGET     of spmdkit's plan: tpu:v5p:4x4x4, gpu:h100:2x8
    NAME=VALUE of MaxText's base.yml, as on its command line

MaxText's train_compile cannot compile for GPUs that are not there, and its table of topologies lacks some slices, so
its mesh is built from the devices of the target.
"""

import argparse
import math
import os
import re
from pathlib import Path

import programs

os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")
programs.prepare()

import jax
import maxtext
import numpy as np
from jax.sharding import AxisType, Mesh
from maxtext.trainers.pre_train import train_compile
from maxtext.utils import accelerator_to_spec_map, max_utils, maxtext_utils

from spmdkit.plan.machine.target import open_target, parse_target

TOPOLOGY = "a3"
"""The name under which MaxText finds the number of devices: that of its eight GPUs."""


def mesh_builder(devices, is_gpu, built):
    """Returns a substitute of MaxText's `get_topology_mesh` for `devices`; the mesh is appended to `built`."""

    def topology_mesh(config):
        if is_gpu:
            dcn, ici = list(config.dcn_parallelism), list(config.ici_parallelism)
            per_slice = len(devices) // math.prod(dcn)
            ici = [per_slice // abs(math.prod(ici)) if size == -1 else size for size in ici]
            array = np.array(devices).reshape([a * b for a, b in zip(dcn, ici, strict=True)])
        else:
            array = maxtext_utils.create_device_mesh(config, devices)
        jax.config.update("jax_remove_size_one_mesh_axis_from_type", config.remove_size_one_mesh_axis_from_type)
        built.append(Mesh(array, config.mesh_axes, axis_types=(AxisType.Auto,) * len(config.mesh_axes)))
        return built[-1]

    return topology_mesh


def flags_of(text):
    """Returns option -> value of `--a=b --c`."""
    pairs = (flag.lstrip("-").partition("=") for flag in (text or "").split())
    return {name: value or "true" for name, _, value in pairs}


def drop_unknown_flags(dropped):
    """Compiles without the options that the compiler does not know; their names are appended to `dropped`."""
    original = jax.stages.Lowered.compile

    def compile_(lowered, compiler_options=None):
        options = dict(compiler_options or {})
        while True:
            try:
                return original(lowered, compiler_options=options or None)
            except Exception as error:
                names = re.findall(r"'?(xla_\w+)'?", str(error).splitlines()[0])
                unknown = [name for name in names if name in options]
                if not unknown:
                    raise
                dropped.append(unknown[0])
                del options[unknown[0]]

    jax.stages.Lowered.compile = compile_


def without_a_gpu(capability):
    """Lets cuDNN's attention be traced without a GPU."""
    from jax._src.cudnn import fused_attention_stablehlo as attention

    attention.check_cudnn_version = lambda: 91200
    attention.check_compute_capability = lambda capabilities: True
    attention.is_cuda_compute_capability_equal = lambda version: version == capability


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("target")
    parser.add_argument("--flags", default="", help="options of the compiler, --a=b --c=d")
    parser.add_argument("settings", nargs="*", help="NAME=VALUE of MaxText's base.yml")
    arguments = parser.parse_intermixed_args()
    target, built, dropped, compiled = open_target(parse_target(arguments.target)), [], [], []
    devices, is_gpu = list(target.devices), target.chip.kind == "gpu"
    spec = accelerator_to_spec_map.UserFacingNameToSystemCharacteristics
    per_slice = len(devices) // target.num_slices
    spec[TOPOLOGY] = accelerator_to_spec_map.SystemCharacteristics("gpu", None, None, None, per_slice, None)
    if is_gpu:
        without_a_gpu("10.0" if target.chip.name in ("b200", "gb200") else "9.0")
    max_utils.parse_libtpu_flags_to_dict = flags_of
    drop_unknown_flags(dropped)
    train_compile.get_topology_mesh = mesh_builder(devices, is_gpu, built)
    original = train_compile.jit_and_compile
    train_compile.jit_and_compile = lambda *a, **k: compiled.append(original(*a, **k)) or compiled[-1]
    watch = programs.Stopwatch()
    train_compile.main(
        [
            "train_compile",
            os.path.join(os.path.dirname(maxtext.__file__), "configs/base.yml"),
            "run_name=plan",
            f"base_output_directory={arguments.out}",
            "dataset_type=synthetic",
            "enable_checkpointing=false",
            f"hardware={'gpu' if is_gpu else 'tpu'}",
            "skip_jax_distributed_system=true",
            f"compile_topology={TOPOLOGY}",
            f"compile_topology_num_slices={target.num_slices}",
            *([f"compile_xla_flags={arguments.flags}"] if arguments.flags else []),
            *arguments.settings,
        ]
    )
    summary = programs.save(arguments.out, compiled[0], built[0], dropped_flags=dropped, **watch.seconds())
    print(f"{arguments.out}: {len(devices)} devices, {summary['axes']}, {summary['cpu_s']} CPU s, dropped {dropped}")


if __name__ == "__main__":
    main()
