"""The kinds of value of a config field: type, range, and JSON schema.

Types are strict: `"10"` is not a number, `true` is not 1, `64.0` is not an integer. pydantic words the rule of a plain
type ("should be a valid integer", "should be greater than 0"); a custom validator raises `Wants` with its own text.
wording.py adds the position, the value and the repair.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, WrapValidator
from pydantic.functional_validators import AfterValidator, PlainValidator
from pydantic_core import core_schema

from spmdkit.foundation import plugins
from spmdkit.foundation.constants import AXES, MAX_FAKE_DEVICES, fake_devices

INT32_MAX = 2**31 - 1


class Wants(ValueError):
    """A value of a field is rejected: what it should be, a valid value (in YAML), and the names for a suggestion."""

    def __init__(self, phrase: str, example: str = "", options: Sequence[str] = ()):
        super().__init__(f"should be {phrase}")
        self.example, self.options = example, options


class Section(BaseModel):
    """Base of every mapping in a config: frozen, strict, no unknown keys, no NaN or infinity."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def _axis_size(value: int) -> int:
    if value == 0 or value < -1:
        raise Wants("at least 1, or -1 to fill with the remaining devices", "-1")
    return value


def _file_name(value: str) -> str:
    if any(ord(c) < 32 or ord(c) == 127 for c in value):
        raise Wants("a path without control characters (NUL, newline, tab)", "runs/first")
    if not value.strip():
        raise Wants("a path that is not empty", "runs/first")
    if any(0xD800 <= ord(c) <= 0xDFFF for c in value):
        raise Wants("a path without lone surrogates, which no file name can have", "runs/first")
    if value.startswith("~"):
        raise Wants("an expanded path: `~` is not expanded here", "/home/me/runs/first")
    if any(len(part.encode("utf-8", "replace")) > 255 for part in value.split("/")) or len(value) > 4000:
        raise Wants("a path with at most 255 bytes in each part", "runs/first")
    return value


def _bucket(value: str) -> str:
    if not re.fullmatch(r"(gs|s3)://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9](/[\w.=+@-]+)+/?", value, re.ASCII):
        raise Wants(
            "a folder in an object store: gs:// or s3://, a bucket name of at least three characters, and a folder "
            "in it (run_dir is a local folder)",
            "gs://my-bucket/runs/first",
        )
    return value.rstrip("/")


Count = Annotated[int, Field(ge=1, le=INT32_MAX)]


def _count_or_auto(value: Any) -> int | str:
    if value == "auto" and isinstance(value, str):
        return "auto"
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= INT32_MAX:
        raise Wants(f"a whole number from 1 to {INT32_MAX}, or auto", "1", ("auto",))
    return value


CountOrAuto = Annotated[
    int | Literal["auto"],
    PlainValidator(_count_or_auto),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}]}),
]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
NumBytes = Annotated[int, Field(ge=0, le=2**62)]
Few = Annotated[int, Field(ge=1, le=1024)]
FewOrNone = Annotated[int, Field(ge=0, le=1024)]
Sizes = Annotated[list[Few], Field(max_length=64, examples=[[3]])]
Times = Annotated[int, Field(ge=0, le=1_000_000)]
Seconds = Annotated[float, Field(gt=0, le=1e8)]
Positive = Annotated[float, Field(gt=0, examples=[1.0])]
Fraction = Annotated[float, Field(gt=0, lt=1, examples=[0.999])]
Flag = bool
Name = Annotated[str, Field(min_length=1)]
TaskName = Annotated[str, Field(min_length=1, examples=["my_task.py:task"])]
Bucket = Annotated[str, AfterValidator(_bucket), Field(examples=["gs://my-bucket/runs/first"])]
FileName = Annotated[str, AfterValidator(_file_name), Field(examples=["runs/first"])]
AxisSize = Annotated[int, Field(le=INT32_MAX, examples=[-1]), AfterValidator(_axis_size)]


def choice(value: Any, names: Sequence[str], also: str = "") -> str:
    """Returns `value` if it is one of `names`; otherwise the message lists them and the alternatives, and suggests the
    nearest."""
    if isinstance(value, str) and value in names:
        return value
    listed = [*names, also] if also else list(names)
    raise Wants(f"{', '.join(listed[:-1])} or {listed[-1]}", names[0], names)


# kinds that are a file each ---------------------------------------------------------------------------------------


class _Environments:
    """Checks the name of an environment, and lists the names in the JSON schema."""

    def __get_pydantic_core_schema__(self, _source: Any, _handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(lambda value: choice(value, self._names()))

    def __get_pydantic_json_schema__(self, _schema: Any, _handler: Any) -> dict[str, Any]:
        return {"enum": self._names()}

    def _names(self) -> list[str]:
        return ["auto", "none", *plugins.names("environments")]


Environment = Annotated[str, _Environments()]

# devices ---------------------------------------------------------------------------------------------------------


def _devices(value: Any) -> str | list[int]:
    wants = Wants("auto, cpu:N or a list of local device indices", "cpu:8", ("auto", "cpu:8"))
    if value == "auto":
        return "auto"
    if isinstance(value, str):
        count = fake_devices(value)
        if count is None:
            raise Wants(f"cpu:N with N from 1 to {MAX_FAKE_DEVICES}", "cpu:8") if value[:4] == "cpu:" else wants
        return f"cpu:{count}"
    if not isinstance(value, list) or not value:
        raise wants
    if any(isinstance(v, bool) or not isinstance(v, int) or not 0 <= v <= INT32_MAX for v in value):
        raise Wants("auto, cpu:N or a list of whole numbers of at least 0", "[0, 1]")
    if len(set(value)) != len(value):
        raise Wants("a list that names each device once", "[0, 1]")
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
]

# layout ----------------------------------------------------------------------------------------------------------

Dim = str | tuple[str, ...] | None
Rule = tuple[str, tuple[Dim, ...]]
"""A path pattern (regex, matched with fullmatch) and, for each dim, a logical or mesh axis, several, or None."""


_RULE_EXAMPLE = '[["blocks/.*/kernel", ["embed", "mlp"]]]'


def _rule(value: Any) -> Rule:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise Wants("a pair [path pattern, [one axis name or null for each dim]]", _RULE_EXAMPLE)
    pattern, dims = value
    if not isinstance(pattern, str) or not pattern:
        raise Wants("a pair with a regular expression over paths of parameters as its first item", _RULE_EXAMPLE)
    if not isinstance(dims, list | tuple) or not all(_is_dim(d) for d in dims):
        raise Wants(
            "a pair with a list of a name, a list of names or null for each dim as its second item", _RULE_EXAMPLE
        )
    _check_pattern(pattern, _RULE_EXAMPLE)
    return pattern, tuple(tuple(d) if isinstance(d, list) else d for d in dims)


def _check_pattern(pattern: str, example: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise Wants(f"a regular expression ({error})", example) from None


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
]


def _axes(value: Any) -> str | list[str] | None:
    names = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(names, list) or (value is not None and not names):
        raise Wants("a mesh axis, a list of them, or null for: not sharded", "fsdp")
    for name in names:
        choice(name, AXES)
    if len(set(names)) != len(names):
        raise Wants("a list that names each axis once", "[data, fsdp]")
    return value if value is None or isinstance(value, str) else names


MeshAxes = Annotated[
    str | list[str] | None,
    PlainValidator(_axes),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": list(AXES)},
                {"type": "array", "items": {"enum": list(AXES)}, "minItems": 1},
                {"type": "null"},
            ]
        }
    ),
]

# names with options ----------------------------------------------------------------------------------------------


def _name_or_options(value: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, dict) and len(value) == 1 and isinstance(next(iter(value)), str)):
        return value
    raise Wants("a name, or a mapping of one name to its options")


NamedChoice = Annotated[
    str | dict[str, Any],
    PlainValidator(_name_or_options),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object", "minProperties": 1, "maxProperties": 1}]}),
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
        raise Wants("a number of at least 0, or a mapping {name: <optax schedule>, ...}", "1e-3")
    return float(value)


LearningRate = Annotated[
    float | dict[str, Any],
    PlainValidator(_learning_rate),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, _NAMED]}),
]


def _compiler_options(value: Any) -> Any:
    if not isinstance(value, dict) or not all(isinstance(name, str) and name for name in value):
        raise Wants("a mapping of XLA option names to values", "{xla_tpu_scoped_vmem_limit_kib: 65536}")
    if not all(x is None or isinstance(x, bool | int | float | str) for x in value.values()):
        raise Wants("a mapping to numbers, text, true, false or null", "{xla_tpu_scoped_vmem_limit_kib: 65536}")
    return value


CompilerOptions = Annotated[
    dict[str, bool | int | float | str | None],
    PlainValidator(_compiler_options),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": ["boolean", "number", "string", "null"]}}),
]
Optimizer = Annotated[
    dict[str, Any],
    WithJsonSchema(_NAMED),
    Field(examples=["{name: adamw}"]),
]

# precision, remat, model state -----------------------------------------------------------------------------------


def _no_float16(value: Any) -> Any:
    if value == "float16":
        raise Wants(
            "bfloat16, which has float32's range: float16 needs loss scaling, which is not supported", "bfloat16"
        )
    return value


Dtype = Annotated[
    Literal["float32", "bfloat16", "float64"],
    BeforeValidator(_no_float16),
]


def widest(*names: str) -> Any:
    """Returns the widest dtype that a config may name."""
    return max(names, key=("bfloat16", "float32", "float64").index)


def _inputs(value: Any) -> str | list[str]:
    if not isinstance(value, list):
        return choice(value, ("compute", "given"), "a list of patterns of paths in a batch")
    if not value or not all(isinstance(pattern, str) for pattern in value):
        raise Wants("a list of regular expressions, each of a whole path of an array in a batch", "[image]")
    for pattern in value:
        _check_pattern(pattern, "[image]")
    return value


Inputs = Annotated[
    str | list[str],
    PlainValidator(_inputs),
    WithJsonSchema(
        {"anyOf": [{"enum": ["compute", "given"]}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
    ),
]


def dtype_to_mapping(value: Any) -> Any:
    """Returns `{compute: value}` for the name of a dtype; other values are left to the model."""
    if isinstance(value, str):
        return {
            "compute": choice(
                _no_float16(value), ("float32", "bfloat16"), "a mapping {compute, params, reduce, inputs}"
            )
        }
    return value


def _batches(value: Any) -> int | list[int]:
    pair = value if isinstance(value, list | tuple) else [value, value]
    numbers = all(isinstance(x, int) and not isinstance(x, bool) and 1 <= x <= INT32_MAX for x in pair)
    if len(pair) != 2 or not numbers or pair[0] > pair[1]:
        raise Wants("the number of a batch, from 1 on, or a pair [first, last]", "[12, [40, 44]]")
    return value if isinstance(value, int) else list(value)


Batches = Annotated[
    int | list[int],
    PlainValidator(_batches),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1},
                {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 2, "maxItems": 2},
            ]
        }
    ),
]

POLICIES = ("stop", "skip", "rollback", "continue")
Policy = Literal["stop", "skip", "rollback", "continue"]


def policy_to_mapping(value: Any) -> Any:
    """Returns `{loss, gradient, metrics, evaluation}` for the name of one policy; an evaluation changes nothing, so it
    can only stop a run."""
    if isinstance(value, dict | Section):
        return value
    policy = choice(value, POLICIES, "a mapping {loss, gradient, metrics, evaluation}")
    policies = dict.fromkeys(("loss", "gradient", "metrics"), policy)
    return policies | {"evaluation": "continue" if policy == "continue" else "stop"}


def names_or(names: Sequence[str], model: type[Section]) -> WrapValidator:
    """Returns the validator of a field that holds one of `names` or a mapping checked by `model`."""

    def check(value: Any, _handler: Any) -> Any:
        if isinstance(value, dict | model):
            return model.model_validate(value)
        return choice(value, names, f"a mapping with keys out of {', '.join(model.model_fields)}")

    return WrapValidator(check)
