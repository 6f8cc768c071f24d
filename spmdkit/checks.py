"""Calling the user's functions so that what goes wrong in them is said as theirs: short, with their own line."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax

from spmdkit import compat, scope
from spmdkit.errors import ConfigError, SpmdkitError, UserCodeError

T = TypeVar("T")

_PACKAGE = str(Path(__file__).parent) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGED = re.compile(r"[/\\](?:site|dist)-packages[/\\](\w+)")
_REFUSING = {
    "jax": "JAX",
    "jaxlib": "JAX",
    "numpy": "numpy",
    "opt_einsum": "einsum",
    "flax": "flax",
    "equinox": "equinox",
    "optax": "optax",
    "einops": "einops",
}
"""Libraries that a model is written with: what they raise says that shapes, dtypes or names do not fit together."""

_LONGEST_CAUSE = 500


def call_user(fn: Callable[[], T], what: str) -> T:
    """Returns `fn()`, while it runs or traces the user's function called `what`.

    Raises:
        ConfigError: JAX, or a library of models, refused what the function does (shapes, dtypes, branches on values), or
            spmdkit did (`sk.mean` of something else).
        UserCodeError: the function itself raised; `__cause__` has its frames.
    """
    try:
        with compat.whole_tracebacks():
            return fn()
    except ConfigError as error:
        frame = user_frame(error)
        if frame is None:
            raise
        raise ConfigError(f"{error}{_shown(frame)}") from error
    except SpmdkitError:
        raise
    except (Exception, SystemExit) as error:
        frame = user_frame(error)
        where = f" at {frame.filename}:{frame.lineno}" if frame else ""
        who = _refused_by(error) if frame else None
        if frame is None or who is None:
            raise UserCodeError(f"{what} raised {type(error).__name__}{where}: {shortened(error)}") from error
        if who == "spmdkit":
            raise ConfigError(f"{what}: {shortened(error)}{_shown(frame)}") from error
        raise ConfigError(
            f"{what} cannot be traced: {who} raised {type(error).__name__}: {shortened(error)}{_shown(frame)}\n{_repair(error, what)}"
        ) from error


def _shown(frame: traceback.FrameSummary) -> str:
    return f"\n  {frame.filename}:{frame.lineno}: {frame.line}".rstrip(": ")


def shortened(error: BaseException) -> str:
    """Returns the first paragraph of an exception's text, without JAX's notes about its own files and types."""
    first, *more = re.sub(r"\{V:[^}]*\}", "", str(error)).strip().split("\n\n")
    text = f"{first}\n{more[0]}" if more and first.endswith(":") else first
    lines = [
        line for line in text.splitlines() if not line.startswith(("The error occurred while tracing", "See https:"))
    ]
    text = "\n".join(lines) or "it gave no reason"
    return text if len(text) <= _LONGEST_CAUSE else f"{text[:_LONGEST_CAUSE]} ..."


def _refused_by(error: BaseException) -> str | None:
    """Returns the library whose frame raised, or None where it was the user's own code."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    if last.startswith(_PACKAGE):
        return "spmdkit"
    found = _PACKAGED.search(last)
    return _REFUSING.get(found[1]) if found else None


def _repair(error: BaseException, what: str) -> str:
    if isinstance(error, jax.errors.JAXTypeError | jax.errors.JAXIndexError):
        return (
            f"While {what} is compiled its arrays have shapes and no values. Use jnp.where or jax.lax.cond for `if`, and jnp for "
            "np, float() and int()."
        )
    parts = (
        "The shapes and dtypes in it" if what == "init" else "The parameters, the data and what is computed from them"
    )
    return f"{parts} have to fit together. Mend that line."


def user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Returns the innermost frame that belongs neither to spmdkit nor to an installed package."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_library(f.filename)]
    return frames[-1] if frames else None


def _is_library(filename: str) -> bool:
    return filename.startswith((_PACKAGE, _STDLIB, "<")) or _PACKAGED.search(filename) is not None


def refuses_none_key(loss_fn: Callable[..., Any], arguments: tuple[Any, ...]) -> bool:
    """Returns whether `loss_fn(*arguments, None)` fails to trace, while other things are as in training."""
    num = jax.tree.leaves(arguments[-1])[0].shape[0]

    def run(*args: Any) -> Any:
        with scope.over(scope.Examples(num, None, jax.numpy.arange(num), None)):
            return loss_fn(*args, None)

    try:
        jax.eval_shape(run, *arguments)
    except Exception as error:  # noqa: BLE001 - any failure at all means: this loss wants its key
        return not isinstance(error, NameError) or "unbound axis" not in str(error)
    return False
