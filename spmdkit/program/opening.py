"""Builds the program of a config: loads the task with its hooks, selects devices, and resolves `auto` settings."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from spmdkit.cluster import Cluster, ClusterSpec, detect_cluster, join
from spmdkit.compat.user_mesh import ignores_user_settings
from spmdkit.config import Config, check_batch, load_config, replace_keys
from spmdkit.config.task import IN_PYTHON
from spmdkit.errors import ConfigError
from spmdkit.mesh import mesh
from spmdkit.program import auto, memory
from spmdkit.program.program import Program
from spmdkit.program.task import Task, load_hooks, load_task


@ignores_user_settings
def build(
    config: Config | str | Path,
    task: Task | None = None,
    devices: Sequence[jax.Device] | None = None,
    overrides: Sequence[str] = (),
) -> Program:
    """Returns the program of a config: a path to YAML or a `Config`. Joins the processes of the environment (`spmdkit
    launch`, srun, mpirun, a pod), as `sk.train` does: a custom loop is one job.

    Args:
        task: replaces the config's task.
        devices: used instead of all of JAX's devices; JAX has then joined the processes already.
        overrides: `key=value` strings, as on the command line; only with a path.

    Raises:
        ConfigError: the config, the task or the data are invalid; raised before any array exists. Or the environment
            has several processes, and JAX has not joined them.
        RendezvousError: processes did not start in time.
        UserCodeError: a function of the task raised an exception.
    """
    if not isinstance(config, Config):
        config = load_config(config, overrides)
    if devices is None:
        devices = join_processes(config).devices
    else:
        _check_joined(detect_cluster(os.environ, config.cluster.environment), jax.process_count())
    return open_program(config, task_of(config) if task is None else task, devices)


def join_processes(config: Config) -> Cluster:
    """Returns the processes of the environment, joined as the config requests.

    Raises:
        ConfigError: the process is an evaluator, or its variables are wrong.
    """
    spec = detect_cluster(os.environ, config.cluster.environment)
    if spec.role == "evaluator":
        raise ConfigError(
            f"this process is an evaluator ({spec.found_by}), and does not train. `spmdkit train` starts it as one; "
            "from Python call spmdkit.run.evaluator.evaluate_each(config), or set cluster: {environment: none} to "
            "train separately."
        )
    limit_s = config.watchdog.longest_timeout_s if config.watchdog else None
    cluster = join(spec, config.devices, collective_timeout_s=limit_s, interface=config.cluster.interface)
    _check_joined(spec, cluster.num_processes)
    return cluster


def _check_joined(spec: ClusterSpec, num_joined: int) -> None:
    """Raises ConfigError if the environment names several processes and each would train a separate model."""
    if spec.num_processes > 1 and num_joined == 1:
        raise ConfigError(
            f"the job has {spec.num_processes} processes ({spec.found_by}), but JAX has joined 1: each process would "
            "train a separate model. Omit `devices`: sk.build(config) joins them. Or set cluster: {environment: none} "
            "to train separately."
        )


def task_of(config: Config) -> Task:
    """Returns the task of a config with its hooks. Raises ConfigError if the config names none."""
    if config.task == IN_PYTHON:
        raise ConfigError(
            "the config names no task. In Python a task is passed: sk.train(task=task, ...), sk.build(config, task). "
            "Pass it, or name it: task: my_task.py:task."
        )
    target, name = config.task_reference()
    return with_hooks(load_task(target, name, config.folder, config.task_args), config)


def with_hooks(task: Task, config: Config) -> Task:
    """Returns the task with the config's hooks appended to its hooks."""
    hooks = load_hooks(config.hooks, config.folder)
    return dataclasses.replace(task, hooks=(*task.hooks, *hooks)) if hooks else task


def open_program(
    config: Config,
    task: Task,
    devices: Sequence[jax.Device],
    limit_bytes: int | None = None,
    print_line: Callable[[str], None] = lambda line: None,
) -> Program:
    """Returns the program of a config. `auto` settings are selected by compiled memory.

    Args:
        limit_bytes: memory limit per device; default: as reported by the devices.
        print_line: receives one line per candidate of `auto`.
    """
    if not auto.is_auto(config):
        return Program(config, task, devices)
    sizes = mesh.resolve(config.mesh.sizes(), len(devices), mesh.slices(devices))
    check_batch(config, sizes)
    limit = memory.memory_limit(devices) if limit_bytes is None else limit_bytes
    among = auto.choices(config, mesh.count(sizes, mesh.BATCH_AXES))
    first = Program(replace_keys(config, among[0][0]), task, devices)
    make = lambda changes: first if changes == among[0][0] else first.with_step(changes)
    return auto.choose(among, limit, make, print_line)  # type: ignore[no-any-return]
