"""The types of config fields, with their ranges and JSON schemas.

Types are strict: `"10"` is not a number, `true` is not 1, `64.0` is not an integer. For plain types the rule is in
pydantic's words ("should be a valid integer", "should be greater than 0"). A custom validator raises `InvalidValue`
with a custom text. wording.py adds the position, the value and the repair.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    WrapValidator,
)

from spmdkit.foundation import plugins
from spmdkit.foundation.constants import AXES, MAX_FAKE_DEVICES, fake_devices

INT32_MAX = 2**31 - 1


class InvalidValue(ValueError):
    """A rejected value of a field: the rule, a valid value (in YAML), and the names for a suggestion."""

    def __init__(self, phrase: str, example: str = "", options: Sequence[str] = ()):
        super().__init__(f"should be {phrase}")
        self.example, self.options = example, options


@functools.cache
def descriptions(section: type[BaseModel]) -> Mapping[str, str]:
    """Returns the docstrings of a section's fields, each as one line. pydantic's `use_attribute_docstrings` would parse
    the source of every section on import (0.1 s); messages and the schema need it."""
    found: dict[str, str] = {}
    for cls in reversed([cls for cls in section.__mro__ if issubclass(cls, Section)]):
        definition = ast.parse(inspect.getsource(cls)).body[0]
        assert isinstance(definition, ast.ClassDef)
        for field, text in itertools.pairwise(definition.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return found


def _describe(schema: dict[str, Any], section: type[BaseModel]) -> None:
    for name, text in descriptions(section).items():
        schema["properties"][name]["description"] = text


class Section(BaseModel):
    """Base of every mapping in a config: frozen and strict, without unknown keys, NaN or infinity. A field's docstring
    is its description."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        json_schema_extra=_describe,
    )


def expects(phrase: str, example: str = "", options: Sequence[str] = ()) -> WrapValidator:
    """Returns the validator of a union: it raises an inner validator's `InvalidValue`, or one for all errors of
    pydantic."""

    def check(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            inner = [e.get("ctx", {}).get("error") for e in error.errors(include_url=False)]
            found = next((e for e in inner if isinstance(e, InvalidValue)), InvalidValue(phrase, example, options))
            found.example = found.example or example
            raise found from None

    return WrapValidator(check)


def choice(value: Any, names: Sequence[str], also: str = "") -> str:
    """Returns `value` if it is one of `names`. Otherwise the error lists the names and alternatives, and suggests the
    nearest."""
    if isinstance(value, str) and value in names:
        return value
    listed = [*names, also] if also else list(names)
    raise InvalidValue(f"{', '.join(listed[:-1])} or {listed[-1]}", names[0], names)


def _axis_size(value: int) -> int:
    if value == 0 or value < -1:
        raise InvalidValue("at least 1, or -1 to fill with the remaining devices", "-1")
    return value


def _path_text(value: Any) -> Any:
    """Returns the text of a `pathlib.Path`, such as `Result.run_dir`; other values unchanged."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _file_name(value: str) -> str:
    if value.startswith("~"):
        raise InvalidValue("an expanded path: `~` is not expanded here", "/home/me/runs/first")
    parts = [part.encode("utf-8", "replace") for part in value.split("/")]
    if not value.strip() or len(value) > 4000 or any(len(part) > 255 for part in parts):
        raise InvalidValue("a path that is not empty, with at most 255 bytes in each part", "runs/first")
    if re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", value):
        raise InvalidValue("a path without control characters (NUL, newline, tab) or lone surrogates", "runs/first")
    return value


def _bucket(value: str) -> str:
    if not re.fullmatch(r"(gs|s3)://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9](/[\w.=+@-]+)+/?", value, re.ASCII):
        raise InvalidValue(
            "a folder in an object store: gs:// or s3://, a bucket name of at least three characters, and a folder "
            "in it (run_dir is a local folder)",
            "gs://my-bucket/runs/first",
        )
    return value.rstrip("/")


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except (re.error, OverflowError, RecursionError) as error:
        raise InvalidValue(f"a regular expression ({error})") from None
    return value


def _distinct(value: list[Any]) -> list[Any]:
    if len(set(value)) != len(value):
        raise InvalidValue("a list that names each only once")
    return value


def _ascending(value: list[int]) -> list[int]:
    if value[0] > value[1]:
        raise InvalidValue("a pair [first, last] in this order")
    return value


def _increasing(value: list[int]) -> list[int]:
    if any(a >= b for a, b in itertools.pairwise(value)):
        raise InvalidValue("a list of lengths in ascending order", "[128, 256, 512]")
    return value


def _numbers(value: Any) -> Any:
    """Returns a mapping with numbers as keys, which are text in JSON and TOML, in ascending order."""
    if not isinstance(value, dict):
        return value
    number: Callable[[Any], Any] = lambda key: int(key) if isinstance(key, str) and key.isdecimal() else key
    numbered = {number(key): size for key, size in value.items()}
    return dict(sorted(numbered.items())) if all(isinstance(key, int) for key in numbered) else numbered


def _from_zero(value: dict[int, int]) -> dict[int, int]:
    if 0 not in value:
        raise InvalidValue("a mapping that starts at 0, the size of step 1", "{0: 256, 2000: 1024}")
    return value


def _fake_cpus(value: str) -> str:
    if (count := fake_devices(value)) is None:
        raise InvalidValue(f"cpu:N with N from 1 to {MAX_FAKE_DEVICES}", "cpu:8")
    return f"cpu:{count}"


def _no_accelerator(value: Any) -> Any:
    if isinstance(value, str) and (named := re.fullmatch(r"(gpu|cuda|rocm|tpu)s?:?(\d{0,4})", value.lower())):
        indices = list(range(int(named[2] or 0)))[:8]
        raise InvalidValue(
            "auto (all accelerators of a machine), or a list of local device indices",
            str(indices) if indices else "auto",
        )
    return value


def _no_float16(value: Any) -> Any:
    if value == "float16":
        raise InvalidValue(
            "bfloat16, which has float32's range: float16 needs loss scaling, which is not supported", "bfloat16"
        )
    return value


def _environments() -> list[str]:
    return ["auto", "none", *plugins.names("environments")]


Count = Annotated[int, Field(ge=1, le=INT32_MAX)]
CountOrAuto = Annotated[
    Count | Literal["auto"], expects(f"a whole number from 1 to {INT32_MAX}, or auto", "1", ("auto",))
]
BatchSize = Annotated[
    Count
    | Annotated[
        dict[Annotated[int, Field(ge=0, le=INT32_MAX)], Count], BeforeValidator(_numbers), AfterValidator(_from_zero)
    ],
    expects("a valid integer, or a schedule such as {0: 256, 2000: 1024}", "32"),
]
Index = Annotated[int, Field(ge=0, le=INT32_MAX)]
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
FileName = Annotated[str, BeforeValidator(_path_text), AfterValidator(_file_name), Field(examples=["runs/first"])]
AxisSize = Annotated[int, Field(le=INT32_MAX, examples=[-1]), AfterValidator(_axis_size)]
Pattern = Annotated[str, Field(min_length=1), AfterValidator(_pattern)]
Dtype = Annotated[Literal["float32", "bfloat16", "float64"], BeforeValidator(_no_float16)]
Environment = Annotated[
    str,
    BeforeValidator(lambda value: choice(value, _environments())),
    Field(json_schema_extra=lambda schema: schema.update(enum=_environments())),
]
Devices = Annotated[
    Literal["auto"]
    | Annotated[str, Field(pattern="^cpu:"), AfterValidator(_fake_cpus)]
    | Annotated[list[Index], Field(min_length=1), AfterValidator(_distinct)],
    BeforeValidator(_no_accelerator),
    expects("auto, cpu:N or a list of local device indices", "cpu:8", ("auto", "cpu:8")),
]

Dims = Annotated[tuple[Name, ...], Field(strict=False, min_length=1)]
LayoutRule = Annotated[
    tuple[Pattern, Annotated[tuple[Name | Dims | None, ...], Field(strict=False)]],
    Field(strict=False),
    expects(
        "a pair [regular expression over paths of parameters, [a name, a list of names or null for each dim]]",
        '[["blocks/.*/kernel", ["embed", "mlp"]]]',
    ),
]
"""A path pattern (regex, matched with fullmatch) and, for each dim, a logical or mesh axis, several axes, or None."""

NameRule = Annotated[
    tuple[Pattern, str | None],
    Field(strict=False),
    expects(
        "a pair [regular expression over names in the file, path of a leaf, or null for an array that is not used]",
        '[["h\\.(\\d+)\\.weight", "blocks/\\1/w"]]',
    ),
]
NameRules = Annotated[
    list[NameRule] | str | Annotated[dict[str, Any], Field(min_length=1, max_length=1)],
    expects(
        "a list of pairs [pattern, path of a leaf], a map (gpt2), or file.py:name of a function under @sk.weights",
        '[["h\\.(\\d+)\\.weight", "blocks/\\1/w"]]',
    ),
]

AxisName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$", examples=["dp"])]
Axis = Literal["replica", "data", "pipeline", "fsdp", "expert", "context", "tensor"]
MeshAxes = Annotated[
    Axis | Annotated[list[Axis], Field(min_length=1), AfterValidator(_distinct)] | None,
    expects(f"a mesh axis ({', '.join(AXES)}), a list of them, or null for: not sharded", "fsdp", AXES),
]
NamedChoice = Annotated[
    str | Annotated[dict[str, Any], Field(min_length=1, max_length=1)],
    expects("a name, or a mapping of one name to its options"),
]

_NAMED = {
    "type": "object",
    "properties": {"name": {"type": "string", "description": "The function's name in optax."}},
    "required": ["name"],
}
Optimizer = Annotated[dict[str, Any], WithJsonSchema(_NAMED), Field(examples=["{name: adamw}"])]
LearningRate = Annotated[
    Annotated[float, Field(ge=0, lt=1e30)] | Annotated[dict[str, Any], WithJsonSchema(_NAMED)],
    expects("a number of at least 0, or a mapping {name: <optax schedule>, ...}", "1e-3"),
]
CompilerOptions = Annotated[
    dict[Name, bool | int | float | str | None],
    expects(
        "a mapping of XLA option names to numbers, text, true, false or null",
        "{xla_tpu_scoped_vmem_limit_kib: 65536}",
    ),
]
Inputs = Annotated[
    Literal["compute", "given"] | Annotated[list[Pattern], Field(min_length=1)],
    expects(
        "compute, given or a list of regular expressions, each of a whole path of an array in a batch",
        "[image]",
        ("compute", "given"),
    ),
]
Range = Annotated[
    list[Count],
    Field(strict=False, min_length=2, max_length=2),
    AfterValidator(_ascending),
    expects("a pair [first, last] of steps", "[20, 25]"),
    Field(examples=[[20, 25]]),
]
Boundaries = Annotated[
    list[Count], Field(min_length=2, max_length=64), AfterValidator(_increasing), Field(examples=[[128, 256, 512]])
]
Batches = Annotated[
    Count | Annotated[list[Count], Field(strict=False, min_length=2, max_length=2), AfterValidator(_ascending)],
    expects("the number of a batch, from 1 on, or a pair [first, last]", "[12, [40, 44]]"),
]
Policy = Literal["stop", "skip", "rollback", "continue"]


def widest(*names: str) -> Any:
    """Returns the widest dtype that a config can name."""
    return max(names, key=("bfloat16", "float32", "float64").index)


def default_reduction(given: dict[str, Any]) -> Any:
    """Returns the default of `precision.reduction` from the other dtypes of the section."""
    narrow = given.get("compute") == "bfloat16"
    return "bfloat16" if narrow else widest("float32", given.get("params", "float32"))


def dtype_to_mapping(value: Any) -> Any:
    """Returns `{compute: value}` for the name of a dtype. The model validates other values."""
    if isinstance(value, str):
        return {
            "compute": choice(
                _no_float16(value), ("float32", "bfloat16"), "a mapping {compute, params, reduction, inputs}"
            )
        }
    return value


def best_mode(value: Any, given: ValidationInfo) -> Any:
    """Returns the direction of a metric: by default `min` for a loss, as in Keras and transformers. Other names have no
    default: neither library agrees with the other on them."""
    if value is None and not given.data.get("metric", "loss").endswith("loss"):
        raise InvalidValue("min or max (the default is min for a metric with a name that ends with loss)", "max")
    return "min" if value is None else value


def source_to_mapping(value: Any) -> Any:
    """Returns `{file: value}` or `{path: value}` for the name of a source of weights."""
    if isinstance(value, str):
        return {"file" if value.endswith((".safetensors", ".json")) else "path": value}
    return value


def policy_to_mapping(value: Any) -> Any:
    """Returns `{loss, gradient, metrics, evaluation}` for the name of one policy. An evaluation does not change the
    state, so it can only stop a run."""
    if isinstance(value, dict | Section):
        return value
    policy = choice(value, get_args(Policy), "a mapping {loss, gradient, metrics, evaluation}")
    policies = dict.fromkeys(("loss", "gradient", "metrics"), policy)
    return policies | {"evaluation": "continue" if policy == "continue" else "stop"}


def names_or(names: Sequence[str], model: type[Section]) -> WrapValidator:
    """Returns the validator of a field that is one of `names` or a mapping checked by `model`."""

    def check(value: Any, _handler: Any) -> Any:
        if isinstance(value, dict | model):
            return model.model_validate(value)
        return choice(value, names, f"a mapping with keys out of {', '.join(model.model_fields)}")

    return WrapValidator(check)
