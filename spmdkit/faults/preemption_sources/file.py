"""A file that an agent of the scheduler creates or touches: `preemption: [{file: {path: /run/preempt}}]`. A file last
changed before this process started is an old notice."""

from __future__ import annotations

import time
from pathlib import Path

from spmdkit.errors import ConfigError
from spmdkit.faults.preemption_sources.base import PreemptionSource


def make(path: str, every_s: float = 1.0) -> PreemptionSource:
    """Returns the source of a file; a relative path refers to the working directory."""
    if not isinstance(path, str) or not path:
        raise ConfigError(
            f"file.path is {path!r}. It is the path of a file that will be made or touched. Write "
            f"{{file: {{path: /run/preempt}}}}."
        )
    file, begun = Path(path).absolute(), time.time()

    def notice() -> str:
        try:
            changed = file.stat().st_mtime
        except FileNotFoundError:
            return ""
        return f"the file {file}" if changed >= begun else ""

    return PreemptionSource(notice, every_s)
