"""`spmdkit` and `python -m spmdkit`: handles signals before the large imports, which take a second or two; then runs
the command line."""

import contextlib
import faulthandler
import os
import signal
import sys

EARLY = {"SIGINT": 130, "SIGTERM": 42, "SIGHUP": 42, "SIGUSR1": 42}
"""Signal -> exit code of `train` and `launch` while there is nothing to save: restart, except for Ctrl-C."""


def main() -> int:
    """Runs the command line; returns or exits with the exit code."""
    early = {name: code for name, code in EARLY.items() if hasattr(signal, name)}
    trains = sys.argv[1:2] in (["train"], ["launch"])
    for name, code in early.items():
        number = getattr(signal, name)
        if (trains or name == "SIGINT") and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_, code=code: os._exit(code))
    if sys.argv[1:2] == ["train"] and hasattr(signal, "SIGQUIT") and sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # no descriptor
            faulthandler.register(signal.SIGQUIT, all_threads=True)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # a launcher has blocked it until now
    if not os.path.exists("/proc/driver/nvidia"):  # with the extra gpu-plan JAX would log that it finds no cuDNN
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    from spmdkit.foundation import garbage

    garbage.collect_rarely()
    from spmdkit.faults import streams

    streams.ignore_closed_outputs(when_full=trains)
    from spmdkit.cli import main as run

    if not trains:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    code = int(run() or 0)
    garbage.never_collect()
    return code


if __name__ == "__main__":
    sys.exit(main())
