"""`Pool`: worker processes that run one job at a time each. A worker that dies or hangs fails only its current case."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import IO, Any

from spmdkit.cluster.join import num_threads
from spmdkit.foundation.timeouts import VERIFY_JOB_S
from spmdkit.launch.process import start

MAX_LINES = 3

Job = dict[str, Any]
Response = dict[str, Any]


class Pool:
    """Worker processes, started on demand. The context manager terminates them on exit."""

    def __init__(self, spec: dict[str, Any], num: int):
        self._folder = tempfile.TemporaryDirectory(prefix="spmdkit-verify-")
        folder = Path(self._folder.name)
        self._spec = folder / "spec.json"
        self._spec.write_text(json.dumps({**spec, "folder": str(folder)}), encoding="utf-8")
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        environment["NPROC"] = str(num_threads(spec["devices"]))
        self._threads = ThreadPoolExecutor(num)
        self._workers = [_Worker(self._spec, folder / f"worker-{i}.log", environment) for i in range(num)]

    def request(self, job: Job) -> Response:
        """Returns the first worker's response to one job. Meanwhile the remaining workers start and open the task."""
        for worker in self._workers[1:]:
            self._threads.submit(worker.request, {"kind": "open"})
        return self._workers[0].request(job)

    def run(self, jobs: Iterable[Job], done: Callable[[Job, Response], None]) -> None:
        """Runs all jobs, and calls `done` in this thread as each job ends."""
        free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            free.put(worker)

        def work(job: Job) -> tuple[Job, Response]:
            worker = free.get()
            try:
                return job, worker.request(job)
            finally:
                free.put(worker)

        for future in as_completed([self._threads.submit(work, job) for job in jobs]):
            done(*future.result())

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.closed = True
            worker.end()
        self._threads.shutdown(cancel_futures=True)
        self._folder.cleanup()


class _Worker:
    def __init__(self, spec: Path, log: Path, environment: dict[str, str]):
        self._spec, self._log, self._environment = spec, log, environment
        self._process: subprocess.Popen[str] | None = None
        self.closed = False
        self._turn = threading.Lock()

    def request(self, job: Job) -> Response:
        """Returns the worker's response, or an error if it died or timed out; the next job then gets a new process."""
        with self._turn:
            return self._request(job)

    def _request(self, job: Job) -> Response:
        interrupted: Response = {"error": {"code": 70, "message": "interrupted"}}
        if self.closed:
            return interrupted
        process = self._process or self._start()
        if self.closed:  # while it started
            self.end()
            return interrupted
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(VERIFY_JOB_S, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        finally:
            timed_out = not timer.is_alive()
            timer.cancel()
        if line:
            result: dict[str, Any] = json.loads(line)
            return result
        if self.closed:
            return interrupted
        return {"error": {"code": 70, "message": self._describe_exit(timed_out)}}

    def _start(self) -> subprocess.Popen[str]:
        log: IO[str] = self._log.open("w", encoding="utf-8")
        command = [sys.executable, "-m", "spmdkit.verify.worker", str(self._spec)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        self._process = start(command, self._environment, **pipes, text=True)
        log.close()
        return self._process

    def _describe_exit(self, timed_out: bool) -> str:
        code = self.end(kill=False)
        if timed_out:
            return f"the process took longer than {VERIFY_JOB_S:.0f} s and was killed"
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        lines = [line for line in self._log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        checks = [line for line in lines if "Check failed" in line] or lines
        return f"the process ended {how}: {' / '.join(checks[-MAX_LINES:])[:500]}"

    def end(self, kill: bool = True) -> int:
        """Kills the process, or waits for one that is exiting; returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        if kill:
            process.kill()
        code = process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        return code
