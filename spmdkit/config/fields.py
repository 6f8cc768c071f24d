"""The kinds of value that a config field holds: their range, and the words that a message uses for them.

Types are strict: `"10"` is no number, `true` is no 1, `64.0` is no whole number. Each kind carries an `Expects`, which
`problems.py` turns into the rule and the repair of a message, so that no field writes its own error text. A validator
that finds something more to say raises `ValueError` with one sentence, which is added to that message.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, WrapValidator
from pydantic.functional_validators import AfterValidator, PlainValidator

MESH_AXES = ("replica", "data", "fsdp", "expert", "context", "tensor", "pipeline")
"""The axis names that `mesh` may hold."""

LOGICAL_AXES: Mapping[str, tuple[str, ...]] = {
    "batch": ("replica", "data", "fsdp", "expert"),
    "embed": ("fsdp",),
    "mlp": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "vocab": ("tensor",),
    "expert": ("expert",),
    "layers": ("pipeline",),
    "sequence": ("context",),
    "norm_sequence": ("context", "tensor"),
}
"""Logical dim name -> mesh axes, before `layout.axes` is added."""

INT32_MAX = 2**31 - 1
MAX_FAKE_DEVICES = 4096


class Expects(NamedTuple):
    """What a field wants, in words, and a value that works (as one writes it in YAML)."""

    phrase: str
    example: str = ""
    options: Sequence[str] = ()


class Section(BaseModel):
    """Base of every mapping in a config: frozen, strict, no unknown keys, no NaN or infinity."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def _axis_size(value: int) -> int:
    if value == 0 or value < -1:
        raise ValueError("-1 takes the devices that the other axes leave.")
    return value


def _file_name(value: str) -> str:
    if any(ord(c) < 32 or ord(c) == 127 for c in value):
        raise ValueError("Control characters (NUL, newline, tab) are refused in names of files.")
    if not value.strip():
        raise ValueError("It is empty.")
    if value.startswith("~"):
        raise ValueError("`~` is the shell's and is not expanded here: write the whole path.")
    if any(len(part.encode("utf-8", "replace")) > 255 for part in value.split("/")) or len(value) > 4000:
        raise ValueError("No part of a path is longer than 255 bytes.")
    return value


Count = Annotated[int, Field(ge=1, le=INT32_MAX), Expects("a whole number of at least 1")]


def _count_or_auto(value: Any) -> int | str:
    if value == "auto" and isinstance(value, str):
        return "auto"
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= INT32_MAX:
        raise ValueError
    return value


CountOrAuto = Annotated[
    int | Literal["auto"],
    PlainValidator(_count_or_auto),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}]}),
    Expects("a whole number of at least 1, or auto", "1", ("auto",)),
]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1), Expects("a whole number from 0 to 4294967295")]
NumBytes = Annotated[int, Field(ge=0, le=2**62), Expects("a whole number of bytes of at least 0")]
Few = Annotated[int, Field(ge=1, le=1024), Expects("a whole number from 1 to 1024")]
Seconds = Annotated[float, Field(gt=0, le=1e8), Expects("a number of seconds above 0")]
Positive = Annotated[float, Field(gt=0), Expects("a number above 0")]
Fraction = Annotated[float, Field(gt=0, lt=1), Expects("a number between 0 and 1, both excluded", "0.999")]
Flag = Annotated[bool, Expects("true or false")]
Name = Annotated[str, Field(min_length=1), Expects("text that is not empty")]
TaskName = Annotated[
    str, Field(min_length=1), Expects("path/to/file.py:name or package.module:name", "my_task.py:task")
]
FileName = Annotated[str, AfterValidator(_file_name), Expects("the path of a directory", "runs/first")]
AxisSize = Annotated[
    int,
    Field(le=INT32_MAX),
    AfterValidator(_axis_size),
    Expects("a whole number of at least 1, or -1 for what is left", "-1"),
]


def choice(value: Any, names: Sequence[str]) -> str:
    """Returns `value` when it is one of `names`; the message lists them and names the nearest."""
    if isinstance(value, str) and value in names:
        return value
    raise ValueError


# kinds that are a file each ---------------------------------------------------------------------------------------


def kinds(folder: str) -> list[str]:
    """Returns the names of the files of a folder of spmdkit that holds one kind in each, without importing any."""
    return sorted(m.name for m in pkgutil.iter_modules([str(Path(__file__).parents[1] / folder)]) if m.name != "base")


DIALECTS = ("auto", "none", *kinds("cluster/dialects"))

Dialect = Annotated[
    str,
    PlainValidator(lambda value: choice(value, DIALECTS)),
    WithJsonSchema({"enum": list(DIALECTS)}),
    Expects(f"one of {', '.join(DIALECTS)}", "auto", DIALECTS),
]

# devices ---------------------------------------------------------------------------------------------------------


def _devices(value: Any) -> str | list[int]:
    if value == "auto":
        return "auto"
    if isinstance(value, str):
        match = re.fullmatch(r"cpu:([0-9]{1,9})", value)
        if not match:
            raise ValueError
        if not 1 <= int(match[1]) <= MAX_FAKE_DEVICES:
            raise ValueError(f"N is from 1 to {MAX_FAKE_DEVICES}.")
        return f"cpu:{int(match[1])}"
    if not isinstance(value, list) or not value:
        raise ValueError
    if any(isinstance(v, bool) or not isinstance(v, int) or not 0 <= v <= INT32_MAX for v in value):
        raise ValueError("The indices are whole numbers of at least 0.")
    if len(set(value)) != len(value):
        raise ValueError("An index is given twice.")
    return value


Devices = Annotated[
    str | list[int],
    PlainValidator(_devices),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": "^(auto|cpu:[0-9]+)$"},
                {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
            ]
        }
    ),
    Expects("auto, cpu:N or a list of local device indices", "cpu:8", ("auto", "cpu:8")),
]

# layout ----------------------------------------------------------------------------------------------------------

Dim = str | tuple[str, ...] | None
Rule = tuple[str, tuple[Dim, ...]]
"""A path pattern (regex, matched with fullmatch) and, for each dim, a logical or mesh axis, several, or None."""


def _rule(value: Any) -> Rule:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError
    pattern, dims = value
    if not isinstance(pattern, str) or not pattern:
        raise ValueError("The first item is a regular expression over paths of parameters.")
    if not isinstance(dims, list | tuple) or not all(_is_dim(d) for d in dims):
        raise ValueError("The second item is a list with a name, a list of names or null for each dim.")
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"The pattern is no regular expression: {error}.") from None
    return pattern, tuple(tuple(d) if isinstance(d, list) else d for d in dims)


def _is_dim(value: Any) -> bool:
    names = value if isinstance(value, list | tuple) and value else [value]
    return value is None or all(isinstance(name, str) and name for name in names)


LayoutRule = Annotated[
    Rule,
    PlainValidator(_rule),
    WithJsonSchema(
        {
            "type": "array",
            "prefixItems": [{"type": "string"}, {"type": "array", "items": {"type": ["string", "array", "null"]}}],
            "items": False,
            "minItems": 2,
        }
    ),
    Expects("a pair [path pattern, [one axis name or null for each dim]]", '[["blocks/.*/kernel", ["embed", "mlp"]]]'),
]


def _axes(value: Any) -> str | list[str] | None:
    names = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(names, list) or (value is not None and not names):
        raise ValueError("null means: not sharded.")
    for name in names:
        choice(name, MESH_AXES)
    if len(set(names)) != len(names):
        raise ValueError("An axis is given twice.")
    return value


MeshAxes = Annotated[
    str | list[str] | None,
    PlainValidator(_axes),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": list(MESH_AXES)},
                {"type": "array", "items": {"enum": list(MESH_AXES)}, "minItems": 1},
                {"type": "null"},
            ]
        }
    ),
    Expects(f"mesh axes, out of {', '.join(MESH_AXES)}", "fsdp", MESH_AXES),
]

# names with options ----------------------------------------------------------------------------------------------


def _name_or_options(value: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, dict) and len(value) == 1 and isinstance(next(iter(value)), str)):
        return value
    raise ValueError


NamedChoice = Annotated[
    str | dict[str, Any],
    PlainValidator(_name_or_options),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object", "minProperties": 1, "maxProperties": 1}]}),
    Expects("a name, or a mapping of one name to its options"),
]

_NAMED = {
    "type": "object",
    "properties": {"name": {"type": "string", "description": "The function's name in optax."}},
    "required": ["name"],
}


def _learning_rate(value: Any) -> Any:
    if isinstance(value, dict):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e30:
        raise ValueError
    return float(value)


LearningRate = Annotated[
    float | dict[str, Any],
    PlainValidator(_learning_rate),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, _NAMED]}),
    Expects("a number of at least 0, or a mapping {name: <optax schedule>, ...}", "1e-3"),
]


def _compiler_options(value: Any) -> Any:
    if not isinstance(value, dict) or not all(isinstance(name, str) and name for name in value):
        raise ValueError
    if not all(x is None or isinstance(x, bool | int | float | str) for x in value.values()):
        raise ValueError("Each value is a number, text, true, false or null.")
    return value


CompilerOptions = Annotated[
    dict[str, bool | int | float | str | None],
    PlainValidator(_compiler_options),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": ["boolean", "number", "string", "null"]}}),
    Expects("a mapping of names of XLA's options to values", "{xla_tpu_scoped_vmem_limit_kib: 65536}"),
]
Optimizer = Annotated[
    dict[str, Any],
    WithJsonSchema(_NAMED),
    Expects("a mapping {name: <optax optimizer>, ...}", "{name: adamw}"),
]

# precision, remat, model state -----------------------------------------------------------------------------------


def _no_float16(value: Any) -> Any:
    if value == "float16":
        raise ValueError("float16 needs loss scaling, which is not built. bfloat16 has float32's range and needs none.")
    return value


Dtype = Annotated[
    Literal["float32", "bfloat16", "float64"],
    BeforeValidator(_no_float16),
    Expects("float32, bfloat16 or float64", "bfloat16", ("float32", "bfloat16", "float64")),
]


def widest(*names: str) -> Any:
    """Returns the widest of the dtypes that a config may name."""
    return max(names, key=("bfloat16", "float32", "float64").index)


def _inputs(value: Any) -> str | list[str]:
    if not isinstance(value, list):
        return choice(value, ("compute", "given"))
    if not value or not all(isinstance(pattern, str) for pattern in value):
        raise ValueError("A pattern is a regular expression that matches the whole path of an array in a batch.")
    for pattern in value:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"A pattern is no regular expression: {error}.") from None
    return value


Inputs = Annotated[
    str | list[str],
    PlainValidator(_inputs),
    WithJsonSchema(
        {"anyOf": [{"enum": ["compute", "given"]}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
    ),
    Expects("compute, given or a list of patterns of paths in a batch", "given", ("compute", "given")),
]


def dtype_to_mapping(value: Any) -> Any:
    """Returns `{compute: value}` for the name of a dtype; everything else is left to the model."""
    if isinstance(value, str):
        return {"compute": choice(_no_float16(value), ("float32", "bfloat16"))}
    return value


def names_or(names: Sequence[str], model: type[Section]) -> WrapValidator:
    """Returns the validator of a field that holds one of `names` or a mapping checked by `model`."""

    def check(value: Any, _handler: Any) -> Any:
        if isinstance(value, dict | model):
            return model.model_validate(value)
        return choice(value, names)

    return WrapValidator(check)
