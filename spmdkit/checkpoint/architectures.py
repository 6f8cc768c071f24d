"""Name maps between our parameters and the safetensors files of transformers, in both directions: `names: llama` in
`init_from`, and `spmdkit checkpoint export --names llama`.

A map is a table: each row pairs the path of a parameter with the name of an array, and the dims of both. `*` is the
number of a layer. `(N H)` is one dim, in which H changes fastest. So a row with `D N H` and `(N H) D` is a reshape and
a transpose to read, and the reverse to write; the sizes are those of the parameter. A row with several paths is an
array of several parameters, joined along its dim in parentheses. `blocks/0/query` and the stacked `blocks/query` are
the same row.

Our names are those of `examples/transformer.py` and `examples/gpt.py`. A parameter that a model does not have (a bias,
the head of a model with tied embeddings) needs no other table: its row is not used.

Source: the modeling files of transformers 5 define the names and the layouts. One declaration for both directions
follows the state-dict methods of Haliax and Levanter and the parameter mappings of MaxText.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from spmdkit.checkpoint.lazy_array import LazyArray, concatenate, stack
from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import nearest


class Row(NamedTuple):
    """One array: the paths and dims of its parameters, its name and its dims."""

    paths: str | tuple[str, ...]
    dims: str
    name: str
    name_dims: str


class Architecture(NamedTuple):
    """A map.

    Attributes:
        alias: (pattern, replacement) from other names in files to those of the rows.
        ignored: pattern of the names of arrays that are no parameters.
    """

    rows: tuple[Row, ...]
    alias: tuple[tuple[str, str], ...] = ()
    ignored: str = r"$."


def _norm(path: str, name: str) -> list[Row]:
    return [Row(path, "D", f"{name}.weight", "D"), Row(f"{path}_bias", "D", f"{name}.bias", "D")]


def _linear(path: str, inputs: str, outputs: str, name: str, transposed: bool = True) -> list[Row]:
    """Returns the rows of a product. `transposed`: the array is [outputs, inputs], as in torch."""
    x, y = (f"({dims})" if " " in dims else dims for dims in (inputs, outputs))
    weight = f"{y} {x}" if transposed else f"{x} {y}"
    return [
        Row(path, f"{inputs} {outputs}", f"{name}.weight", weight),
        Row(f"{path}_bias", outputs, f"{name}.bias", y),
    ]


def _gpt2() -> Architecture:
    layer, qkv = "transformer.h.*", ("query", "key", "value")
    product = functools.partial(_linear, transposed=False)
    rows = [
        Row("embed", "V D", "transformer.wte.weight", "V D"),
        Row("position_embed", "T D", "transformer.wpe.weight", "T D"),
        *_norm("blocks/*/attention_norm", f"{layer}.ln_1"),
        Row(tuple(f"blocks/*/{x}" for x in qkv), "D N H", f"{layer}.attn.c_attn.weight", "D (N H)"),
        Row(tuple(f"blocks/*/{x}_bias" for x in qkv), "N H", f"{layer}.attn.c_attn.bias", "(N H)"),
        *product("blocks/*/out", "N H", "D", f"{layer}.attn.c_proj"),
        *_norm("blocks/*/mlp_norm", f"{layer}.ln_2"),
        *product("blocks/*/up", "D", "F", f"{layer}.mlp.c_fc"),
        *product("blocks/*/down", "F", "D", f"{layer}.mlp.c_proj"),
        *_norm("norm", "transformer.ln_f"),
        *_linear("head", "D", "V", "lm_head"),
    ]
    return Architecture(tuple(rows), ((r"^(?=(wte|wpe|h|ln_f)\.)", "transformer."),), r".*\.attn\.(masked_)?bias")


def _llama(*, norms: Mapping[str, str] | None = None) -> Architecture:
    """Returns the map of Llama and of models with the same names. `norms`: those of a layer."""
    layer = "model.layers.*"
    norms = norms or {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    rows = [
        Row("embed", "V D", "model.embed_tokens.weight", "V D"),
        *(row for path, name in norms.items() for row in _norm(f"blocks/*/{path}", f"{layer}.{name}")),
        *_linear("blocks/*/query", "D", "N H", f"{layer}.self_attn.q_proj"),
        *_linear("blocks/*/key", "D", "K H", f"{layer}.self_attn.k_proj"),
        *_linear("blocks/*/value", "D", "K H", f"{layer}.self_attn.v_proj"),
        *_linear("blocks/*/out", "N H", "D", f"{layer}.self_attn.o_proj"),
        Row("blocks/*/query_norm", "H", f"{layer}.self_attn.q_norm.weight", "H"),
        Row("blocks/*/key_norm", "H", f"{layer}.self_attn.k_norm.weight", "H"),
        *_linear("blocks/*/gate", "D", "F", f"{layer}.mlp.gate_proj"),
        *_linear("blocks/*/up", "D", "F", f"{layer}.mlp.up_proj"),
        *_linear("blocks/*/down", "F", "D", f"{layer}.mlp.down_proj"),
        *_norm("norm", "model.norm"),
        *_linear("head", "D", "V", "lm_head"),
    ]
    return Architecture(tuple(rows), ((r"^(?=(embed_tokens|layers|norm)\.)", "model."),), r".*\.rotary_emb\.inv_freq")


def _gemma() -> Architecture:
    """Returns the map of Gemma 2 and 3, with norms before and after attention and MLP."""
    return _llama(
        norms={
            "attention_norm": "input_layernorm",
            "attention_post_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        }
    )


def _bert() -> Architecture:
    embeddings, layer, head = "bert.embeddings", "bert.encoder.layer.*", "cls.predictions"
    rows = [
        Row("embed", "V D", f"{embeddings}.word_embeddings.weight", "V D"),
        Row("position_embed", "T D", f"{embeddings}.position_embeddings.weight", "T D"),
        Row("type_embed", "S D", f"{embeddings}.token_type_embeddings.weight", "S D"),
        *_norm("embed_norm", f"{embeddings}.LayerNorm"),
        *_linear("blocks/*/query", "D", "N H", f"{layer}.attention.self.query"),
        *_linear("blocks/*/key", "D", "N H", f"{layer}.attention.self.key"),
        *_linear("blocks/*/value", "D", "N H", f"{layer}.attention.self.value"),
        *_linear("blocks/*/out", "N H", "D", f"{layer}.attention.output.dense"),
        *_norm("blocks/*/attention_norm", f"{layer}.attention.output.LayerNorm"),
        *_linear("blocks/*/up", "D", "F", f"{layer}.intermediate.dense"),
        *_linear("blocks/*/down", "F", "D", f"{layer}.output.dense"),
        *_norm("blocks/*/mlp_norm", f"{layer}.output.LayerNorm"),
        *_linear("pooler", "D", "E", "bert.pooler.dense"),
        *_linear("transform", "D", "E", f"{head}.transform.dense"),
        *_norm("transform_norm", f"{head}.transform.LayerNorm"),
        Row("head_bias", "V", f"{head}.bias", "V"),
        *_linear("classifier", "D", "C", "classifier"),
    ]
    return Architecture(
        tuple(rows),
        ((r"^(?=(embeddings|encoder|pooler)\.)", "bert."), (r"\.gamma$", ".weight"), (r"\.beta$", ".bias")),
        r".*\.position_ids|cls\.(seq_relationship|predictions\.decoder)\..*",
    )


def _vit() -> Architecture:
    embeddings, layer = "vit.embeddings", "vit.encoder.layer.*"
    rows = [
        Row("class_embed", "D", f"{embeddings}.cls_token", "1 1 D"),
        Row("position_embed", "T D", f"{embeddings}.position_embeddings", "1 T D"),
        Row("patch", "P Q C D", f"{embeddings}.patch_embeddings.projection.weight", "D C P Q"),
        Row("patch_bias", "D", f"{embeddings}.patch_embeddings.projection.bias", "D"),
        *_norm("blocks/*/attention_norm", f"{layer}.layernorm_before"),
        *_linear("blocks/*/query", "D", "N H", f"{layer}.attention.attention.query"),
        *_linear("blocks/*/key", "D", "N H", f"{layer}.attention.attention.key"),
        *_linear("blocks/*/value", "D", "N H", f"{layer}.attention.attention.value"),
        *_linear("blocks/*/out", "N H", "D", f"{layer}.attention.output.dense"),
        *_norm("blocks/*/mlp_norm", f"{layer}.layernorm_after"),
        *_linear("blocks/*/up", "D", "F", f"{layer}.intermediate.dense"),
        *_linear("blocks/*/down", "F", "D", f"{layer}.output.dense"),
        *_norm("norm", "vit.layernorm"),
        *_linear("pooler", "D", "E", "vit.pooler.dense"),
        *_linear("classifier", "D", "C", "classifier"),
    ]
    return Architecture(tuple(rows), ((r"^(?=(embeddings|encoder|layernorm|pooler)\.)", "vit."),))


ARCHITECTURES: Mapping[str, Architecture] = {
    "gpt2": _gpt2(),
    "llama": _llama(),
    "mistral": _llama(),
    "qwen2": _llama(),
    "qwen3": _llama(),
    "gemma": _llama(),
    "gemma2": _gemma(),
    "gemma3_text": _gemma(),
    "bert": _bert(),
    "vit": _vit(),
}
"""The `model_type` of a config.json of transformers -> its map."""


def find(name: str, key: str = "names") -> Architecture:
    """Returns the map `name`. Raises ConfigError, which names `key`, if there is none."""
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{key}: no map '{name}'.{nearest(name, list(ARCHITECTURES))} Maps are {', '.join(ARCHITECTURES)}. For "
            "other names write pairs [pattern, path], or file.py:name of a function under @sk.weights."
        )
    return ARCHITECTURES[name]


def read(
    map_: Architecture,
    names: Iterable[str],
    open_array: Callable[[str], LazyArray],
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterator[tuple[str, LazyArray]]:
    """Yields (path, array with the dims of the parameter) for the parameters in `shapes` (path -> shape) that the
    source has, then (name, array) for arrays that belong to none of them.

    Args:
        names: the names in the source, which `open_array` opens.

    Raises:
        ConfigError: an array does not have the shape that its row requires.
    """
    unused = {_renamed(name, map_.alias): name for name in names}
    for row, paths in _matches(map_, shapes):
        layers = _layers(row, paths[0], shapes[paths[0]])
        of_rows = [row.name.replace("*", layer) for layer in layers or [_layer(paths[0])]]
        if not all(name in unused for name in of_rows):
            continue
        parts = [shapes[path][layers is not None :] for path in paths]
        arrays = [open_array(unused.pop(name)) for name in of_rows]
        boxes = _boxes(row, paths, parts, arrays)
        for path, part, box in zip(paths, parts, boxes, strict=True):
            turned = [_to_ours(row, array[box], part) for array in arrays]
            yield path, turned[0] if layers is None else stack(turned)
    for name in unused.values():
        if not re.fullmatch(map_.ignored, name):
            yield name, open_array(name)


def _renamed(name: str, alias: Iterable[tuple[str, str]]) -> str:
    for pattern, replacement in alias:
        name = re.sub(pattern, replacement, name)
    return name


def _boxes(
    row: Row, paths: tuple[str, ...], parts: list[tuple[int, ...]], arrays: list[LazyArray]
) -> list[tuple[slice, ...]]:
    """Returns the box of each parameter in the array of a row. Raises ConfigError if the array has another shape."""
    required, joined = [_name_shape(row, part) for part in parts], _joined_dim(row)
    whole, boxes = list(required[0]), [tuple(map(slice, required[0]))]
    for shape in required[1:]:
        assert joined is not None
        start, whole[joined] = whole[joined], whole[joined] + shape[joined]
        boxes.append((*map(slice, shape[:joined]), slice(start, whole[joined]), *map(slice, shape[joined + 1 :])))
    for array in arrays:
        if array.shape != tuple(whole):
            raise ConfigError(
                f"{array}: expected {whole} ({row.name_dims}) for {', '.join(paths)} of {list(parts[0])} ({row.dims}). "
                "The task and the file have models of one size. Correct the sizes in task_args."
            )
    return boxes


def write(map_: Architecture, arrays: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """Returns name -> array of the file, for the parameters in `arrays` (path -> array).

    Raises:
        ConfigError: the map has no row for a parameter.
    """
    out, used = dict[str, LazyArray](), set[str]()
    for row, paths in _matches(map_, {path: array.shape for path, array in arrays.items()}):
        used |= {*paths}
        layers = _layers(row, paths[0], arrays[paths[0]].shape)
        for i, layer in enumerate(layers or [_layer(paths[0])]):
            parts = [arrays[path] if layers is None else arrays[path].at(i) for path in paths]
            turned = [_to_theirs(row, part) for part in parts]
            joined = _joined_dim(row)
            out[row.name.replace("*", layer)] = turned[0] if joined is None else concatenate(turned, joined)
    if unknown := [path for path in arrays if path not in used]:
        raise ConfigError(
            f"export: the map has no row for {', '.join(unknown[:4])} ({len(unknown)} of {len(arrays)} parameters). "
            "Each parameter needs a name in the file. Name another map, or export without names."
        )
    return out


def _matches(map_: Architecture, shapes: Mapping[str, Any]) -> Iterator[tuple[Row, tuple[str, ...]]]:
    """Yields (row, the paths of its parameters) for each row and layer with parameters in `shapes`."""
    for row in map_.rows:
        patterns = (row.paths,) if isinstance(row.paths, str) else row.paths
        for path in shapes:
            if match := re.fullmatch(re.escape(patterns[0]).replace(r"/\*", r"(/\d+)?"), path):
                layer = match.group(1) or "" if match.groups() else ""
                paths = tuple(pattern.replace("/*", layer) for pattern in patterns)
                if all(path in shapes for path in paths):
                    yield row, paths


def _layer(path: str) -> str:
    return next((part for part in path.split("/") if part.isdecimal()), "")


def _layers(row: Row, path: str, shape: tuple[int, ...]) -> list[str] | None:
    """Returns the numbers of the layers that a parameter stacks along its first dim, or None."""
    return None if "*" not in row.name or _layer(path) else [str(i) for i in range(shape[0])]


def _flat(row: Row) -> list[str]:
    return [dim for group in _groups(row.name_dims) for dim in group]


def _groups(dims: str) -> list[list[str]]:
    """Returns the dims of each dim: `(N H) 1 D` is [[N, H], [], [D]]."""
    found = re.findall(r"\(([^)]*)\)|(\S+)", dims)
    return [[] if one == "1" else (many or one).split() for many, one in found]


def _joined_dim(row: Row) -> int | None:
    if isinstance(row.paths, str):
        return None
    return next(i for i, group in enumerate(_groups(row.name_dims)) if len(group) > 1)


def _sizes(row: Row, shape: tuple[int, ...]) -> dict[str, int]:
    if len(shape) != len(row.dims.split()):
        raise ConfigError(
            f"{row.paths}: expected the dims {row.dims}, found {list(shape)}. The map converts parameters with these "
            "dims. For others write a function under @sk.weights."
        )
    return dict(zip(row.dims.split(), shape, strict=True))


def _name_shape(row: Row, shape: tuple[int, ...]) -> tuple[int, ...]:
    sizes = _sizes(row, shape)
    return tuple(math.prod(sizes[dim] for dim in group) for group in _groups(row.name_dims))


def _to_ours(row: Row, array: LazyArray, shape: tuple[int, ...]) -> LazyArray:
    sizes, inner = _sizes(row, shape), _flat(row)
    return array.reshape(*(sizes[dim] for dim in inner)).transpose(*(inner.index(dim) for dim in row.dims.split()))


def _to_theirs(row: Row, array: LazyArray) -> LazyArray:
    shape, ours = _name_shape(row, array.shape), row.dims.split()
    return array.transpose(*(ours.index(dim) for dim in _flat(row))).reshape(*shape)
