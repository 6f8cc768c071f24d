"""Writes samples of the model to the trackers every `every` steps and at the last step.

    @sk.samples                                   # in my_task.py
    def write(program, state):
        text = generate(program.eval_params(state))
        return {"continuation": text, "attention": image}

    hooks: [{samples: {fn: my_task.py:write, every: 500}}]

All processes call the function, so it may start computations on sharded parameters. It returns name -> text, an image
[height, width] or [height, width, channels] (uint8, or floats from 0 to 1), or a list of numbers, shown as a histogram.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from spmdkit.errors import ConfigError
from spmdkit.foundation import user_code
from spmdkit.run.hooks.base import Hook, RunView


def make(fn: str, every: int = 1000, name: str = "samples") -> Hook:
    """Returns the hook. `name` distinguishes several of them in one run."""
    if not isinstance(fn, str) or ":" not in fn:
        raise ConfigError(f"samples: fn is {fn!r}. It names a function under @sk.samples. Write fn: my_task.py:write.")
    found: list[Callable[..., Mapping[str, Any]]] = []

    def begin(run: RunView, step: int, state: Any) -> None:
        found[:] = [user_code.find(fn, "samples", run.config.folder)]

    def after_step(run: RunView, step: int, state: Any, metrics: Any) -> None:
        values = found[0](run.program, state)
        if not isinstance(values, Mapping):
            raise ConfigError(f"samples: {fn} returned {type(values).__name__}. It returns {{name: text or array}}.")
        whole = run.gather({key: x for key, x in values.items() if not isinstance(x, str)})
        for key, value in {**values, **whole}.items():
            run.write({"step": step, key: value}, kind_of(value))

    return Hook(name, every=every, begin=begin, after_step=after_step)


def kind_of(value: Any) -> str:
    """Returns the kind of record that shows a sample."""
    return "text" if isinstance(value, str) else "image" if np.ndim(value) in (2, 3) else "histogram"
