"""Calling the user's functions so that what goes wrong in them is said as theirs: short, with their own line."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax

from spmdkit import scope
from spmdkit.errors import ConfigError, SpmdkitError, UserCodeError
from spmdkit.scope import Form

T = TypeVar("T")

_PACKAGE = str(Path(__file__).parent) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep


def call_user(fn: Callable[[], T], what: str) -> T:
    """Returns `fn()`, while it runs or traces the user's function called `what`.

    Raises:
        ConfigError: JAX refused what the function does (shapes, dtypes): the innermost frame is not the user's.
        UserCodeError: the function itself raised; `__cause__` has its frames.
    """
    try:
        return fn()
    except SpmdkitError:
        raise
    except Exception as error:
        frame = user_frame(error)
        where = f" at {frame.filename}:{frame.lineno}" if frame else ""
        if frame is None or _innermost_is(error, frame):
            raise UserCodeError(f"{what} raised {type(error).__name__}{where}: {error}") from error
        first = str(error).strip().split("\n\n")[0]
        raise ConfigError(
            f"{what} cannot be traced: JAX raised {type(error).__name__}{where}: {first}\n"
            f"The shapes and dtypes of init, the data and {what} have to fit together. Mend that line."
        ) from error


def traces_in_form(trace: Callable[[], Any], form: Form, what: str) -> bool:
    """Returns whether the user's function can be traced in `form`; False where another form of the step may still fit.

    `plain` binds no names of replica axes; `manual` refuses a loop whose carry begins mirrored and becomes the replica's own.

    Raises:
        ConfigError, UserCodeError: it cannot be traced in any form; see `call_user`.
    """

    def attempt() -> bool:
        try:
            trace()
        except (NameError, TypeError, ValueError) as error:
            text = str(error)
            unbound = form == "plain" and "unbound axis name" in text
            mirrored = form == "manual" and ("manual axis types" in text or "varying" in text)
            if unbound or mirrored:
                return False
            raise
        return True

    return call_user(attempt, what)


def user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Returns the innermost frame that belongs neither to spmdkit nor to an installed package."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_library(f.filename)]
    return frames[-1] if frames else None


def _innermost_is(error: BaseException, frame: traceback.FrameSummary) -> bool:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return (last.filename, last.lineno) == (frame.filename, frame.lineno)


def _is_library(filename: str) -> bool:
    return filename.startswith((_PACKAGE, _STDLIB, "<")) or "site-packages" in filename


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
