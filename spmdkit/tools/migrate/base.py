"""Building blocks of a migration: the new config, and a line for each setting of the other project."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

LOST, MAPPED, AUTOMATIC = "lost: changes training", "mapped", "automatic"
KINDS = (LOST, MAPPED, AUTOMATIC)
"""The lists of a migration, in their order: settings without which training differs, or may; settings with a key;
settings that need none."""


class Translation(NamedTuple):
    """The translation of one setting: `why` is its new key, or why it has none and what to do about it."""

    kind: str
    key: str
    value: Any
    why: str


class Migration:
    """The config so far, and the translation of each setting.

    Args:
        devices: number of devices of the job; sizes per device are multiplied by it.
    """

    def __init__(self, devices: int = 1):
        self.devices = devices
        self.config: dict[str, Any] = {}
        self.lines: list[Translation] = []

    def put(self, path: str, value: Any) -> None:
        """Sets `a.b` of the config; a list is appended to an existing one."""
        *folders, name = path.split(".")
        section = self.config
        for folder in folders:
            section = section.setdefault(folder, {})
        section[name] = [*section.get(name, []), *value] if isinstance(value, list) else value

    def mapped(self, key: str, value: Any, path: str, to: Any, note: str = "") -> None:
        """Sets a key of the config, and reports it."""
        self.put(path, to)
        self.lines.append(Translation(MAPPED, key, value, f"{path}: {shown(to)}{note and f' ({note})'}"))

    def report(self, kind: str, key: str, value: Any, why: str) -> None:
        """Reports the translation of a setting."""
        self.lines.append(Translation(kind, key, value, why))


def remove_without_effect(migration: Migration) -> None:
    """Removes keys that have no effect without an axis of the mesh, and reports a missing learning rate."""
    config, mesh = migration.config, migration.config.get("mesh", {})
    axes = {"attention.context": "context", "attention.order": "context", "pipeline": "pipeline", "layout.zero": "fsdp"}
    for path, axis in axes.items():
        section, _, name = path.partition(".")
        holder = config.get(section, {}) if name else config
        if mesh.get(axis, 1) == 1 and (name or section) in holder:
            value = holder.pop(name or section)
            migration.report(AUTOMATIC, path, value, f"has no effect without mesh.{axis}, so it is omitted")
        if name and not config.get(section, True):
            config.pop(section)
    if "optimizer" in config and "learning_rate" not in config:
        config["learning_rate"] = DEFAULT_RATE
        why = f"it is not in this file: set learning_rate ({DEFAULT_RATE:g} is written)"
        migration.report(LOST, "learning rate", None, why)


DEFAULT_RATE = 1e-3
NO_OPTIMIZER = "a config cannot name this optimizer: make it in the task, Task(optimizer=...)"

Rule = Callable[[Migration, str, Any], None]
Table = Mapping[str, "Rule | Mapping[str, Any]"]


def each(names: str, rule: Rule) -> dict[str, Rule]:
    """Returns a table with one rule for several settings, separated by spaces."""
    return dict.fromkeys(names.split(), rule)


def walk(migration: Migration, settings: Mapping[str, Any], table: Table, prefix: str = "") -> None:
    """Applies the rule of each setting, or the table of a section to its settings. A setting without a rule is
    unknown."""
    for name, value in settings.items():
        key, rule = f"{prefix}{name}", table.get(str(name))
        if rule is None:
            unknown(migration, key, value)
        elif callable(rule):
            apply(rule, migration, key, value)
        elif isinstance(value, Mapping):
            walk(migration, value, rule, f"{key}.")
        elif value not in (None, {}):
            migration.report(LOST, key, value, "expected a section, ignored")


def unknown(migration: Migration, key: str, value: Any) -> None:
    """The rule of a setting that no table has."""
    kind, why = (LOST, "unknown setting, ignored: it may change training") if is_set(value) else (AUTOMATIC, "off")
    migration.report(kind, key, value, why)


def apply(rule: Rule, migration: Migration, key: str, value: Any) -> None:
    """Applies the rule of a setting. A value that the rule cannot read is reported and ignored."""
    try:
        rule(migration, key, value)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError):
        migration.report(LOST, key, value, "the value has an unexpected form, ignored")


def section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns the settings of a section; empty if it is not a section."""
    value = settings.get(name)
    return value if isinstance(value, Mapping) else {}


def to(path: str, of: Callable[[Any], Any] = lambda value: value, note: str = "") -> Rule:
    """Returns the rule of a setting that has a key in spmdkit. None and "auto" leave the default."""

    def rule(migration: Migration, key: str, value: Any) -> None:
        if value is None or value == "auto":
            migration.report(AUTOMATIC, key, value, f"the default of {path}")
        else:
            migration.mapped(key, value, path, of(value), note)

    return rule


def external(migration: Migration, key: str, path: str, written: Mapping[str, Any]) -> None:
    """Reports an "auto", which stands for a value outside of the file. `written`: the values in the config until the
    user sets `path`."""
    values = ", ".join(f"{name}: {shown(value)}" for name, value in written.items()) or "nothing"
    why = f"the trainer's own value, which is not in this file: set {path} ({values} is written)"
    migration.report(LOST, key, "auto", why)


def automatic(why: str) -> Rule:
    """Returns the rule of a setting that needs no key in spmdkit."""
    return lambda migration, key, value: migration.report(AUTOMATIC, key, value, why)


def lost(why: str) -> Rule:
    """Returns the rule of a setting that changes training and has no counterpart in spmdkit."""
    return lambda migration, key, value: migration.report(LOST, key, value, why)


def also_set(path: str, value: Any, then: Rule) -> Rule:
    """Returns a rule that also sets another key of the config."""

    def rule(migration: Migration, key: str, given: Any) -> None:
        migration.put(path, value)
        then(migration, key, given)

    return rule


def when(wanted: Callable[[Any], bool], then: Rule, otherwise: Rule) -> Rule:
    """Returns a rule that depends on the value."""
    return lambda migration, key, value: (then if wanted(value) else otherwise)(migration, key, value)


def lost_if_set(why: str) -> Rule:
    """Returns the rule of a setting without a counterpart in spmdkit that changes training unless it is off, empty or
    0, as it is in all its sections."""
    return when(is_set, lost(why), automatic("off"))


def is_set(value: Any) -> bool:
    """Returns whether a setting is neither off, empty, 0, -1 nor "auto"; of a section, whether `enabled` or, without
    it, any of its settings is."""
    if isinstance(value, Mapping):
        return is_set(value["enabled"]) if "enabled" in value else any(is_set(inner) for inner in value.values())
    return value not in (None, False, 0, -1, "", "none", "None", "false", "False", [], "auto")


def flag(path: str, value: Any, why_not: str, note: str = "") -> Rule:
    """Returns the rule of a switch: on sets a key to `value`; off sets nothing; with "auto" the trainer sets the
    value."""
    off = when(lambda given: given == "auto", automatic(f"the trainer's own value: set {path}"), automatic(why_not))
    return when(is_on, lambda m, key, given: m.mapped(key, given, path, value, note), off)


def is_on(value: Any) -> bool:
    """Returns whether a switch of a YAML or JSON file is on."""
    return str(value).strip().lower() in ("true", "yes", "on", "1")


def shown(value: Any) -> str:
    """Returns a value as one line of YAML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {shown(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(shown(v) for v in value) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
