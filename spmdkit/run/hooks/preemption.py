"""Stops if the machine of any process is about to be preempted: `preemption` in a config. The sources are in
faults/preemption_sources/.

All processes agree on a step, save it, and exit with 42. If this process is waiting for data, the notice is handled
like a signal (run/watchdog_callbacks.py).
"""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

from spmdkit.errors import Preempted
from spmdkit.faults.preemption_sources.base import PreemptionSource
from spmdkit.foundation import phase, plugins
from spmdkit.foundation.timeouts import PREEMPTION_SIGNAL_S
from spmdkit.run.hooks.base import Action, Hook, Stop

if TYPE_CHECKING:
    from spmdkit.run.run import Run


def make(config: Any) -> Hook | None:
    """Returns the hook that stops after a notice; None if the config names no source."""
    if not config.preemption:
        return None
    sources = [(plugins.split(choice)[0], plugins.make("preemption_sources", choice)) for choice in config.preemption]
    noticed: list[str] = []
    handled, ended = threading.Event(), threading.Event()

    def begin(run: Run, step: int, state: Any) -> None:
        for name, source in sources:
            thread = threading.Thread(
                target=_watch, args=(run, name, source, noticed, handled, ended), name=f"spmdkit-{name}", daemon=True
            )
            thread.start()

    def after_step(run: Run, step: int, state: Any, metrics: Any) -> Action | None:
        if not noticed:
            return None
        handled.set()
        return Stop(Preempted.exit_code, noticed[0])

    end = lambda *_: ended.set()
    return Hook("preemption", order=44, begin=begin, after_step=after_step, end=end)  # type: ignore[arg-type]  # a Run


def _watch(
    run: Run, name: str, source: PreemptionSource, noticed: list[str], taken: threading.Event, ended: threading.Event
) -> None:
    failed = False
    while not ended.wait(source.every_s):
        try:
            why = source.notice()
        except (OSError, ValueError, KeyError, TypeError) as error:
            if not failed:
                run.events.write("preemption_source_failed", name=name, error=f"{type(error).__name__}: {error}"[:300])
            failed = True
            continue
        if why:
            run.events.write("preemption_notice", name=name, why=why, phase=phase.current_phase().phase)
            noticed.append(why)
            if not taken.wait(PREEMPTION_SIGNAL_S) and not ended.is_set() and run.signals is not None:
                run.signals.received(signal.SIGUSR1)
            return
