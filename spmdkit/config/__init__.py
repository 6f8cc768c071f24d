"""The config of a run.

Input: YAML, JSON, TOML or Python values. Output: one validated, frozen `Config`.

fields.py field types · sections.py, settings.py and retention.py settings · rules.py combinations of settings ·
schema.py `Config` · optimizer.py optax by name · source.py files with line numbers · inheritance.py `base` ·
overrides.py key=value · problems.py and wording.py messages · load.py · show.py · task.py
"""

from spmdkit.config.load import load_config as load_config, parse_config as parse_config, replace_keys as replace_keys
from spmdkit.config.optimizer import (
    build_optimizer as build_optimizer,
    build_schedule as build_schedule,
    choose_optimizer as choose_optimizer,
)
from spmdkit.config.retention import Best as Best, Retention as Retention
from spmdkit.config.rules import batch_unit as batch_unit
from spmdkit.config.rules import check_batch as check_batch
from spmdkit.config.schema import Config as Config
from spmdkit.config.sections import (
    Budget as Budget,
    Checkpoint as Checkpoint,
    Data as Data,
    Eval as Eval,
    Layout as Layout,
    Log as Log,
    Mesh as Mesh,
    Precision as Precision,
    Profile as Profile,
    RematNames as RematNames,
    StateGroup as StateGroup,
)
from spmdkit.config.show import (
    json_schema as json_schema,
    origins as origins,
    to_short_yaml as to_short_yaml,
    to_yaml as to_yaml,
)
