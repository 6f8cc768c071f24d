"""`spmdkit plan`: what the command's options mean, put together."""

from __future__ import annotations

import json
from pathlib import Path

from spmdkit.cluster import environment, join
from spmdkit.config import Config
from spmdkit.plan.document import Document, plan_program, refuse
from spmdkit.plan.target import Target, open_target, parse_target, target_of
from spmdkit.program import build


def run_plan(
    config: Config,
    target: str | None = None,
    as_json: bool = False,
    html: Path | None = None,
) -> None:
    """Plans a config, prints the plan, and fails where it does not fit or exceeds the config's budget.

    Args:
        target: see `target.py`; None: the devices that `train` would use.

    Raises:
        ConfigError: exit code 78, after the plan has been printed.
    """
    document = make_plan(config, target)
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
    machine = choose_target(config, target)
    return plan_program(build(config, devices=machine.devices), machine)


def choose_target(config: Config, target: str | None) -> Target:
    """Returns the target with its devices; None and `here` are the devices that `train` would use."""
    if target is None or target == "here":
        name = config.devices if isinstance(config.devices, str) and config.devices != "auto" else "here"
        return target_of(join(environment({}), config.devices).devices, name)
    return open_target(parse_target(target))
