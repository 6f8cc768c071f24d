"""Compiles spmdkit's train step of a config for a machine that is not there, and saves it as `compile_step.py` does:

python benchmarks/maxtext/compile_ours.py OUT TARGET CONFIG
"""

import sys
from pathlib import Path

import programs

programs.prepare()

from spmdkit.config import load_config
from spmdkit.plan.machine.target import open_target, parse_target
from spmdkit.program.opening import open_program, task_of


def main(out, target_name, config_file):
    watch = programs.Stopwatch()
    target, config = open_target(parse_target(target_name)), load_config(config_file)
    program = open_program(config, task_of(config), target.devices, target.memory_limit_bytes)
    summary = programs.save(out, program.compiled, program.mesh, **watch.seconds())
    print(f"{out}: {target.num_devices} devices, {summary['axes']}, {summary['cpu_s']} CPU s")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
