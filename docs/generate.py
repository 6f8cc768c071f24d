"""The generated parts of docs/reference, in Markdown, which replace a comment `<!-- generated: NAME -->`."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

import spmdkit as sk
from spmdkit.cli import app
from spmdkit.config import Config
from spmdkit.config.show import json_schema
from spmdkit.config.wording import sections
from spmdkit.errors import OUTCOMES

ROOT = Path(__file__).parents[1]
EXAMPLES = Path(__file__).with_name("api_examples.md")
PLACE = re.compile(r"<!-- generated: (\w+) -->")

GROUPS = {
    "A task and its data": ("foundation", "config", "data"),
    "Metrics and gradients": ("step",),
    "Parts of a model": ("ops",),
    "A program and its run": ("program", "run", "checkpoint", "plan", "verify", "cluster", "metrics"),
    "Plug-ins": ("communication",),
}
"""Heading of the API page -> folders of the package that define its symbols; the last group has all others too."""


def fill(text: str) -> str:
    """Returns a page with its generated parts."""
    return PLACE.sub(lambda found: GENERATED[found[1]](), text)


def anchor(heading: str) -> str:
    """Returns the anchor of a heading, as GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def cell(text: Any) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def table(headings: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [headings, ("---",) * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cell(x) for x in line)} |" for line in lines)


# ---- config keys


def config() -> str:
    """Returns a section per mapping of the config: key, meaning, type and default."""
    schema = json_schema()
    parts = []
    models = [(path, model.__name__) for path, model in sections(Config)]
    models += [((key,), name) for key, name in items(schema)]
    for path, model in models:
        title = ".".join(path) or "Top level"
        own = schema if not path else schema["$defs"][model]
        rows = [
            (f"`{name}`", meaning(f, schema), kind(f, name, path), default(f, name in own.get("required", ())))
            for name, f in own["properties"].items()
        ]
        heading = f"## {title if not path else f'`{title}`'}\n\n"
        parts.append(heading + table(("key", "meaning", "type", "default"), rows))
    return "\n\n".join(parts)


def items(schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields (key, model) of the keys at the top level that are a list of mappings."""
    for key, field in schema["properties"].items():
        if "$ref" in (item := field.get("items", {})):
            yield key, item["$ref"].rpartition("/")[2]


def kind(schema: Mapping[str, Any], name: str, path: tuple[str, ...]) -> str:
    """Returns the type of a value in words, with its range; a section is a link."""
    if options := schema.get("anyOf"):
        return " or ".join(dict.fromkeys(kind(option, name, path) for option in options))
    if "$ref" in schema:
        return f"[mapping](#{anchor('.'.join((*path, name)))})"
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    word = {"array": "list", "object": "mapping", "string": "text", "null": "`null`"}.get(
        schema.get("type", ""), schema.get("type", "any value")
    )
    if word == "list" and (item := schema.get("items")):
        return f"list of {kind(item, name, path)}"
    bounds = {
        "minimum": "at least {}",
        "exclusiveMinimum": "above {}",
        "maximum": "at most {}",
        "exclusiveMaximum": "below {}",
    }
    limits = [form.format(schema[key]) for key, form in bounds.items() if key in schema and schema[key] != 2**31 - 1]
    return f"{word} ({', '.join(limits)})" if limits else word


def meaning(schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """Returns the description of a key, or that of its section."""
    section = schema.get("$ref", "").rpartition("/")[2]
    return schema.get("description") or root["$defs"].get(section, {}).get("description", "")


def default(schema: Mapping[str, Any], is_required: bool) -> str:
    """Returns the default as in YAML; a section has those of its keys."""
    if "default" not in schema:
        return "required" if is_required else "empty"
    value = schema["default"]
    return "see its keys" if isinstance(value, dict) and value else f"`{json.dumps(value)}`"


# ---- commands


def commands() -> str:
    """Returns a section per command: usage, arguments, options and the example of its help."""
    top: Any = typer.main.get_command(app)
    return "\n\n".join(command(command_, f"spmdkit {name}") for name, command_ in walk(top))


def walk(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, found in group.commands.items():
        if hasattr(found, "commands"):
            yield from walk(found, f"{prefix}{name} ")
        else:
            yield prefix + name, found


def command(found: Any, name: str) -> str:
    context = typer.Context(found, info_name=name)
    rows = []
    for parameter in found.params:
        is_option = parameter.param_type_name == "option"
        names = (
            ", ".join(f"`{x}`" for x in (*parameter.opts, *parameter.secondary_opts))
            if is_option
            else f"`{(parameter.metavar or parameter.name).upper()}`"
        )
        value = parameter.default
        shown = "" if value in (None, False, (), ...) or callable(value) or parameter.required else f"`{value}`"
        rows.append((names, shown, getattr(parameter, "help", "") or ""))
    example = re.sub(r"^Example: ", "", found.epilog or "")
    parts = [
        f"## `{name}`",
        inspect.cleandoc(found.help or ""),
        f"```text\n{' '.join(found.collect_usage_pieces(context)).join((name + ' ', ''))}\n```",
    ]
    parts += [table(("argument or option", "default", "meaning"), rows)] if rows else []
    return "\n\n".join([*parts, *([f"Example: `{example}`"] if example else [])])


# ---- API


def api() -> str:
    """Returns a section per symbol of `sk.__all__`: signature, docstring, public members, example."""
    groups: dict[str, list[str]] = {title: [] for title in GROUPS}
    for name in sorted(sk.__all__, key=str.lower):
        if not name.startswith("__"):
            groups[group_of(getattr(sk, name))].append(name)
    examples = api_examples()
    parts = []
    for title, names in groups.items():
        parts += [f"## {title}", *(symbol(name, examples.get(name, "")) for name in names)]
    return "\n\n".join(parts)


def group_of(value: Any) -> str:
    folder = (getattr(value, "__module__", None) or value.__name__).split(".")[1]
    return next((title for title, folders in GROUPS.items() if folder in folders), list(GROUPS)[-1])


def symbol(name: str, example: str) -> str:
    value = getattr(sk, name)
    parts = [f"### `sk.{name}`"]
    if callable(value):
        parts.append(f"```python\nsk.{name}{signature(value)}\n```")
    parts.append(markdown(inspect.getdoc(value) or ""))
    if inspect.isclass(value):
        parts += [member(name, *found) for found in members(value)]
    if inspect.ismodule(value):
        names = [
            n
            for n, f in vars(value).items()
            if inspect.isfunction(f) and f.__module__ == value.__name__ and n[0] != "_"
        ]
        parts += [member(name, n, getattr(value, n)) for n in names]
    return "\n\n".join([*parts, *([f"Example:\n\n```python\n{example}\n```"] if example else [])])


def signature(value: Any) -> str:
    """Returns the signature, one parameter per line if it is long. Types of JAX and the package have short names."""
    if value is Config:
        return "(**settings)"
    if inspect.isclass(value) and issubclass(value, Exception):
        return "(message)"
    found = inspect.signature(value)
    parameters = [short(parameter) for parameter in found.parameters.values() if parameter.name != "self"]
    kinds = [parameter.kind for parameter in found.parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parameters.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    is_function = found.return_annotation is not inspect.Signature.empty and not inspect.isclass(value)
    result = f" -> {short(found.return_annotation)}" if is_function else ""
    line = f"({', '.join(parameters)}){result}"
    return line if len(line) < 100 else "(\n" + "".join(f"    {x},\n" for x in parameters) + f"){result}"


def short(found: Any) -> str:
    """Returns a parameter or a type without the modules of its names; a default that is a function is `...`."""
    text = re.sub(r"<function .*? at 0x\w+>|<factory>", "...", str(found).replace('"', "'"))
    text = re.sub(r"^([*\w]+: )'(.*?)'(?= = |$)", r"\1\2", text.removeprefix("<class '").removesuffix("'>"))
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Za-z_])", "", text)


def members(owner: type) -> Iterator[tuple[str, Any]]:
    """Yields the public methods and properties that the package defines, with a docstring."""
    for name, value in inspect.getmembers_static(owner):
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        is_ours = (getattr(function, "__module__", None) or "").startswith("spmdkit")
        if not name.startswith("_") and is_ours and inspect.isfunction(function) and inspect.getdoc(function):
            yield name, value


def member(owner: str, name: str, value: Any) -> str:
    function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    called = "" if isinstance(value, property) else signature(function)
    return (
        f"#### `{owner}.{name}`\n\n```python\n{owner}.{name}{called}\n```\n\n{markdown(inspect.getdoc(function) or '')}"
    )


def markdown(doc: str) -> str:
    """Returns a docstring as Markdown: `Args:` and other sections become headed lists."""
    lines, in_section = [], False
    for line in doc.splitlines():
        if found := re.fullmatch(
            r"(Args|Attributes|Raises|Returns|Yields|Shapes|Layout|Wire|Units|Source|Fields):", line
        ):
            in_section = True
            lines += ["", f"**{found[1]}**", ""]
        elif in_section and (found := re.fullmatch(r"    (?! )(\*{0,2}[\w., /*]+?)(?: \((.*?)\))?: (.*)", line)):
            lines.append(f"- `{found[1]}`: {found[3]}")
        elif in_section and line.startswith("    "):
            lines.append(f"  {line.strip()}")
        else:
            in_section = in_section and not line
            lines.append(line)
    return re.sub(r"(?<!`)<(?=\w)", "\\<", "\n".join(lines).strip())


def api_examples() -> dict[str, str]:
    """Returns symbol -> example, from docs/api_examples.md; a test runs each."""
    if not EXAMPLES.exists():
        return {}
    found = re.findall(r"^## sk\.(\w+)\n+```python\n(.*?)\n```", EXAMPLES.read_text(), re.DOTALL | re.MULTILINE)
    return dict(found)


# ---- tables


def exit_codes() -> str:
    rows: dict[int, list[str]] = {}
    for code, meaning in OUTCOMES.values():
        rows.setdefault(int(code), []).append(meaning)
    lines = [(str(code), "; ".join(meanings)) for code, meanings in sorted(rows.items())]
    return table(("code", "meaning"), [*lines, ("128 + n", "ended by signal n")])


def errors() -> str:
    """Returns the mistakes of tests/bad_input, with the parts of their messages and the exit codes."""
    sys.path.insert(0, str(ROOT))
    from tests.bad_input.test_mistakes import MISTAKES

    titles = {
        "config": "Config",
        "data": "Data",
        "task": "Task",
        "init": "`init`",
        "loss": "Loss",
        "step": "`train_step`",
        "eval": "Evaluation",
    }
    parts = []
    for name, cases in MISTAKES.items():
        rows = []
        for mistake, case in cases.items():
            requested, found, rule, repair = (
                " ... ".join((part,) if isinstance(part, str) else part) for part in case.expected
            )
            message = " ... ".join(f"`{text.replace('`', '')}`" for text in (requested, found) if text)
            rows.append((mistake, message, rule, f"`{repair.replace('`', '')}`" if repair else "", case.exit))
        parts.append(f"## {titles[name]}\n\n" + table(("mistake", "message", "rule", "repair", "exit code"), rows))
    return "\n\n".join(parts)


GENERATED: Mapping[str, Callable[[], str]] = {
    function.__name__: function for function in (config, commands, api, exit_codes, errors)
}
