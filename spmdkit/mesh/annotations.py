"""Shardings that user code names itself: flax's logical axis rules, metadata of linen and nnx on a leaf, and sharding
constraints in `init`.

flax's rules (`nn.logical_axis_rules`, `nn.set_logical_axis_rules`) map the logical names of a model to mesh axes. They
are rows of `layout.axes`. flax itself applies them to the metadata of its models, so that a spec is the one of
`nn.logical_to_mesh_sharding` and `nnx.get_partition_spec`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from spmdkit.errors import ConfigError
from spmdkit.foundation.constants import AXES
from spmdkit.foundation.formatting import nearest, shown
from spmdkit.foundation.jaxprs import open_jaxpr
from spmdkit.foundation.trees import path_name
from spmdkit.mesh.mesh import dim_axes

Dim = str | Sequence[str] | None
Rules = tuple[tuple[str, tuple[str, ...]], ...]
"""Rules in flax's form: (name of a dim, mesh axes). The first rule with a free mesh axis applies."""


@dataclass(frozen=True)
class Annotations:
    """What the user's code names itself.

    Attributes:
        rules: flax's rules in force while user code is traced, with the rows of `layout.axes`; empty: there are none.
        constraints: path of a parameter -> spec of a sharding constraint on it in `init`.
    """

    rules: Rules = ()
    constraints: Mapping[str, PartitionSpec] = field(default_factory=dict)


def rules_in_context() -> Rules:
    """Returns flax's logical axis rules in context, of a `with` or set for the process; empty without flax."""
    spmd = sys.modules.get("flax.core.spmd")
    rules = () if spmd is None else spmd.get_logical_axis_rules()
    return tuple((name, dim_axes(axes)) for name, axes in rules)


def with_rules(rules: Rules) -> contextlib.AbstractContextManager[None]:
    """Context with flax's rules `rules`; without rules, those of the user stay."""
    spmd = sys.modules.get("flax.core.spmd")
    as_written = tuple((name, axes[0] if len(axes) == 1 else axes or None) for name, axes in rules)
    return contextlib.nullcontext() if spmd is None or not rules else spmd.logical_axis_rules(as_written)


def joined(rules: Rules, roles: Mapping[str, str], own: Mapping[str, Dim]) -> Rules:
    """Returns the rules of the user's code on the mesh axes of spmdkit, followed by the rows of `own`, the config's
    `layout.axes`, and by `roles`; empty without rules.

    Raises:
        ConfigError: both have a name with different mesh axes, or a rule names no mesh axis.
    """
    renamed = []
    for name, axes in rules:
        if unknown := [axis for axis in dim_axes(axes) if axis not in {*AXES, *roles}]:
            raise ConfigError(
                f"flax's logical axis rule {name}: {_shown(axes)} names '{unknown[0]}', which is no mesh axis. Mesh "
                f"axes are {', '.join(AXES)}.{nearest(unknown[0], AXES)} Rename it, or give it a role, such as roles: "
                f"{{{unknown[0]}: tensor}}."
            )
        renamed.append((name, tuple(roles.get(axis, axis) for axis in dim_axes(axes))))
    for name, row in own.items():
        found = [axes for other, axes in renamed if other == name]
        if found and dim_axes(row) not in found:
            raise ConfigError(
                f"layout.axes has {name}: {_shown(row)}, and flax's logical axis rules have {name}: "
                f"{_shown(found[0])}. A name has one meaning. Remove it from layout.axes, or change the rule."
            )
    rows = {**roles, **own}.items() if rules else ()
    return (*renamed, *((name, dim_axes(row)) for name, row in rows if name not in dict(renamed)))


def _shown(axes: Dim) -> str:
    names = [*map(shown, dim_axes(axes))]
    return names[0] if len(names) == 1 else f"[{', '.join(names)}]" if names else "null"


def describe_rules(rules: Rules) -> str:
    """Returns rules as text: `embed = fsdp, mlp = tensor, kv = null`."""
    return ", ".join(f"{name} = {_shown(axes)}" for name, axes in rules)


def model_annotations(params: Any, rules: Rules) -> dict[str, tuple[Sequence[Dim], str]]:
    """Returns path -> (dims, reason) for the leaves with metadata of the model (`nn.with_partitioning`,
    `nn.with_logical_partitioning`, `nnx.with_partitioning`). `rules` apply as in flax."""
    named: dict[str, tuple[Sequence[Dim], str]] = {}
    for path, box in jax.tree.leaves_with_path(params, is_leaf=lambda x: _names_of(x) is not None):
        names = _names_of(box)
        for inner, leaf in () if names is None else jax.tree.leaves_with_path(box):
            dims, reason = _dims_of(box, tuple(names or ()), rules)
            missing = len(getattr(leaf, "shape", ())) - len(dims)
            named[path_name((*path, *inner))] = (*dims, *[None] * missing), reason  # as in a PartitionSpec
    return named


def _names_of(x: Any) -> Sequence[Any] | None:
    """Returns the dim names of a linen `Partitioned` box or an nnx `Variable`, without importing flax."""
    if hasattr(x, "get_partition_spec") and isinstance(getattr(x, "names", None), tuple):
        names: tuple[Any, ...] = x.names
        return names
    if hasattr(x, "get_metadata"):
        metadata = x.get_metadata()
        for key in ("sharding_names", "out_sharding", "sharding"):
            found = metadata.get(key) if isinstance(metadata, Mapping) else None
            found = found.spec if isinstance(found, NamedSharding) else found
            if isinstance(found, (tuple, PartitionSpec)) and any(n is not None for n in found):
                return tuple(found)
    return None


def _dims_of(box: Any, names: tuple[Any, ...], rules: Rules) -> tuple[tuple[Dim, ...], str]:
    """Returns (the dims of a box under the rules, the reason). nnx leaves a name without a rule as it is; linen does
    not shard it."""
    is_linen = hasattr(box, "get_partition_spec")
    local = getattr(box, "rules", None) if is_linen else box.get_metadata().get("sharding_rules")
    is_logical = not is_linen or hasattr(box, "rules")
    if not is_logical or not (local or rules):
        return tuple(None if n is PartitionSpec.UNCONSTRAINED else n for n in names), "metadata of the model"
    if is_linen:
        from flax.linen.spmd import logical_to_mesh_axes

        spec: Any = logical_to_mesh_axes(names, tuple(local or rules))
    else:
        meaning = dict(rules) | dict(local or ())
        spec = [meaning.get(name, name) if isinstance(name, str) else name for name in names]
    dims = tuple(None if dim is PartitionSpec.UNCONSTRAINED else dim for dim in spec)
    return dims, f"flax's rules: {', '.join(map(str, names))}"


def constrained_outputs(jaxpr: Any) -> list[PartitionSpec | None]:
    """Returns the spec of the sharding constraint that each output of `init` is the result of; None: there is none."""
    body = open_jaxpr(jaxpr)
    producers = {id(var): (eqn, i) for eqn in body.eqns for i, var in enumerate(eqn.outvars)}

    def spec_of(var: Any) -> PartitionSpec | None:
        eqn, index = producers.get(id(var), (None, 0))
        if eqn is None:
            return None
        sharding = eqn.params.get("sharding", eqn.params.get("dst_sharding"))
        if eqn.primitive.name in ("sharding_constraint", "reshard") and isinstance(sharding, NamedSharding):
            return PartitionSpec(*(None if dim is PartitionSpec.UNCONSTRAINED else dim for dim in sharding.spec))
        if eqn.primitive.name in ("convert_element_type", "copy"):
            return spec_of(eqn.invars[0])
        if eqn.primitive.name in ("jit", "pjit"):
            return constrained_outputs(eqn.params["jaxpr"])[index]
        return None

    return [spec_of(var) for var in body.outvars]
