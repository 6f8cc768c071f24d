"""`spmdkit plan`: what the command's options mean, put together."""

from __future__ import annotations

import json
from pathlib import Path

from spmdkit.cluster import environment, join
from spmdkit.config import Config
from spmdkit.errors import ConfigError
from spmdkit.plan.calibrate import calibrate as run_calibration
from spmdkit.plan.calibrate import describe, rates_file, with_measured
from spmdkit.plan.document import Document, plan_program, refuse
from spmdkit.plan.target import Target, open_target, parse_target, target_of
from spmdkit.program import build


def run_plan(
    config: Config,
    target: str | None = None,
    as_json: bool = False,
    html: Path | None = None,
    calibrate: bool = False,
) -> None:
    """Plans a config, prints the plan, and fails where it does not fit or exceeds the config's budget.

    Args:
        target: see `target.py`; None: the devices that `train` would use.
        calibrate: measure this machine first.

    Raises:
        ConfigError: exit code 78, after the plan has been printed.
    """
    machine = choose_target(config, target)
    if calibrate:
        measure(machine, quiet=as_json)
    document = plan_on(config, machine)
    if html is not None:
        from spmdkit.plan.page import write_page

        write_page(document, html)
    if as_json:
        print(json.dumps(document))
    else:
        from spmdkit.plan.table import show

        show(document)
        if html is not None:
            print(html)
    refuse(document, f"plan of {config.source or 'this config'}")


def make_plan(config: Config, target: str | None = None) -> Document:
    """Returns the plan of a config on a target."""
    return plan_on(config, choose_target(config, target))


def plan_on(config: Config, machine: Target) -> Document:
    """Returns the plan of a config on an opened target, with measured rates where there are some."""
    machine, call_s = with_measured(machine)
    return plan_program(build(config, devices=machine.devices), machine, call_s)


def measure(machine: Target, quiet: bool) -> None:
    """Measures the devices of a target, for this plan and later ones.

    Raises:
        ConfigError: the target is another machine.
    """
    if not machine.is_here:
        raise ConfigError(
            f"--calibrate measures this machine, and the target is {machine.name}. Rates of another machine are those of the chip table. "
            "Use --target here or --target cpu:8."
        )
    rates = run_calibration(machine.devices)
    if not quiet:
        print(f"{describe(rates)}\nwritten to {rates_file()}\n")


def choose_target(config: Config, target: str | None) -> Target:
    """Returns the target with its devices; None and `here` are the devices that `train` would use."""
    if target is None or target == "here":
        name = config.devices if isinstance(config.devices, str) and config.devices != "auto" else "here"
        return target_of(join(environment({}), config.devices).devices, name)
    return open_target(parse_target(target))
