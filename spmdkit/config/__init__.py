"""The config of a run.

Enters: YAML or Python values. Leaves: one checked and frozen `Config`.

fields.py kinds of value · sections.py, settings.py and retention.py the settings · rules.py combinations · schema.py
`Config` · optimizer.py optax by name · source.py YAML with lines · overrides.py key=value · problems.py and wording.py
messages · load.py · show.py · task.py
"""

from spmdkit.config.load import load_config, parse_config, replace_keys
from spmdkit.config.optimizer import build_optimizer, build_schedule, choose_optimizer
from spmdkit.config.retention import Best, Retention
from spmdkit.config.rules import check_batch
from spmdkit.config.schema import Config
from spmdkit.config.sections import (
    Budget,
    Checkpoint,
    Data,
    Eval,
    Layout,
    Log,
    Mesh,
    Precision,
    Profile,
    RematNames,
    StateGroup,
)
from spmdkit.config.show import json_schema, to_short_yaml, to_yaml

__all__ = [
    "Best",
    "Budget",
    "Checkpoint",
    "Config",
    "Data",
    "Eval",
    "Layout",
    "Log",
    "Mesh",
    "Precision",
    "Profile",
    "RematNames",
    "Retention",
    "StateGroup",
    "build_optimizer",
    "build_schedule",
    "check_batch",
    "choose_optimizer",
    "json_schema",
    "load_config",
    "parse_config",
    "replace_keys",
    "to_short_yaml",
    "to_yaml",
]
