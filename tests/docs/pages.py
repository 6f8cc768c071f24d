"""The pages of the site: their blocks, prose and headings, and a runner of the blocks.

A fenced block runs in the order of the page, in the page's folder:

- `bash`: in one shell environment, exports included; a last line `# exit code 78` states another code than 0.
- `python`: in one Python session; a first line `# NAME.py` writes the file instead.
- `yaml`: a first line `# NAME.yaml` writes the file; another block is an excerpt.
- `text` after a `bash` or `python` block: its lines appear in the output in this order. Numbers, paths and spaces may
  differ, and `...` stands for any text or lines.

A first line `# not run: REASON`, or a comment `<!-- not run: REASON -->` above, excludes a block. A comment
`<!-- run: COMMAND -->` runs a command that readers do not see. Blocks of other languages, and directives
(`{code-block}`), do not run.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.environment import QUICK_XLA

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BLOCK_TIMEOUT_S = 240
READS_THE_PROGRAM = re.compile(r"spmdkit (plan|bench|tune|verify)|plan_step|sk\.bill|sk\.testing")
"""Commands that show the compiled program. They compile with all passes of XLA, and so does a page with such Python."""
SESSION = Path(__file__).with_name("python_session.py")
QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0", "XLA_FLAGS": QUICK_XLA}
NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}
"""Silences the TPU compiler on a machine without a TPU."""

_FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+?) -->\n+)?"
    r"^(?P<fence>`{3,})(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=fence)\s*?$"
    r"|^<!-- run: (?P<hidden>.+?) -->$",
    re.MULTILINE | re.DOTALL,
)
_FILE = re.compile(r"# ([\w/.-]+\.(?:py|yaml))\n")
_NOT_RUN = re.compile(r"# not run: (.+)\n")
_EXIT_CODE = re.compile(r"# exit code (\d+)\s*$")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, text and line on the page, and why it is not run."""

    language: str
    text: str
    line: int
    not_run: str | None = None

    @property
    def file(self) -> str | None:
        """Returns the name of the file that the block writes, if it does."""
        found = _FILE.match(self.text)
        return found[1] if found and self.language in ("python", "yaml") else None

    @property
    def runs(self) -> bool:
        return self.language in ("bash", "python") and not self.file and self.not_run is None


def blocks(text: str) -> Iterator[Block]:
    """Yields the blocks of a page; a hidden command is a `bash` block."""
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        if found["hidden"]:
            yield Block("bash", found["hidden"] + "\n", line)
            continue
        reason = found["reason"] or (_NOT_RUN.match(found["text"]) or [None, None])[1]
        yield Block(found["language"].strip(), found["text"], line, reason)


def prose(text: str) -> str:
    """Returns a page without front matter, blocks, comments, tables and headings."""
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    text = re.sub(r"^( *)(`{3,}|:{3,})[^\n]*\n.*?^ *\2 *$", "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    return re.sub(r"^( *\||#| {4,}\S|\[[^\]]+\]: ).*$", "", text, flags=re.MULTILINE)


def sentences(text: str) -> list[int]:
    """Returns the number of words of each sentence of a page's prose. An item of a list ends a sentence."""
    plain = re.sub(r"\]\([^)]*\)", "]", prose(text))
    plain = re.sub(r"`[^`]*`", "code", plain)
    parts = re.split(r"(?<=[.?!])\s+|\n\s*\n|\n\s*(?:[-*]|\d+\.)\s", plain)
    counts = [len(re.findall(r"[\w'/-]*[A-Za-z][\w'/-]*", part)) for part in parts]
    return [count for count in counts if count]


def output_shape(text: str) -> list[str]:
    """Returns the lines of an output without what differs between runs: numbers, paths, bars and spaces."""
    text = re.sub(r"\x1b\[[\d;]*m", "", text)
    text = re.sub(r"(?<![\w.])[~.]?/[\w./+-]+", "PATH", text)
    text = re.sub(r"[-+]?\d[\d.,]*(e[-+]?\d+)?", "0", text)
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def missing_line(expected: str, output: str) -> str | None:
    """Returns the first line of `expected` that `output` does not have, in order; None if it has all of them."""
    lines = iter(output_shape(output))
    for line in output_shape(expected):
        pattern = re.compile(".*".join(re.escape(part.strip()) for part in line.split("...")))
        if line != "..." and not any(pattern.fullmatch(found) for found in lines):
            return line
    return None


def environment() -> dict[str, str]:
    """Returns the environment that all pages have in common."""
    tests = ("SPMDKIT_", "JAX_", "XLA_", "PYTEST", "NPROC")
    own = {"SPMDKIT": str(ROOT), "JAX_PLATFORMS": "cpu", **NO_TPU, "COLUMNS": "160"}
    return {name: value for name, value in os.environ.items() if not name.startswith(tests)} | own


class Page:
    """Runs the blocks of a page in a folder.

    Args:
        folder: an empty folder, or that of the previous page of a tutorial.
        bin: the folder of `spmdkit` and `python`.
    """

    def __init__(self, folder: Path, bin: Path = Path(sys.executable).parent) -> None:
        self.folder, self._bin = folder, bin
        self._session: subprocess.Popen[str] | None = None
        self._quick = QUICK
        self._exports = folder / ".exports"
        self._environment = environment() | {
            "PATH": f"{bin}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(folder),
            "SPMDKIT_COMPILE_CACHE": str(folder.parent / ".compile_cache"),
        }

    def run(self, text: str, name: str) -> None:
        """Runs all blocks of a page; an AssertionError names the line of the block that fails."""
        output = ""
        found = list(blocks(text))
        reads = any(READS_THE_PROGRAM.search(block.text) for block in found if block.language == "python")
        self._quick = {} if reads else QUICK
        try:
            for block in found:
                where = f"{name}:{block.line}"
                if block.file:
                    (self.folder / block.file).parent.mkdir(parents=True, exist_ok=True)
                    (self.folder / block.file).write_text(block.text)
                elif block.runs:
                    expected = int((_EXIT_CODE.search(block.text) or [0, 0])[1])
                    code, output = (self._bash if block.language == "bash" else self._python)(block.text)
                    assert code == expected, f"{where}: exit code {code}, expected {expected}\n{output[-3000:]}"
                elif block.language == "text" and block.not_run is None:
                    missing = missing_line(block.text, output)
                    assert missing is None, f"{where}: no line of the output is\n{missing}\nbut\n{output[-3000:]}"
        finally:
            if self._session:
                self._session.kill()
                self._session.communicate()

    def _bash(self, text: str) -> tuple[int, str]:
        script = (
            f'[ ! -e {self._exports} ] || . {self._exports}; trap "export -p > {self._exports}" EXIT\n'
            f"set -e -o pipefail\n{text}"
        )
        process = subprocess.Popen(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self._environment | ({} if READS_THE_PROGRAM.search(text) else self._quick),
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=BLOCK_TIMEOUT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, output

    def _python(self, text: str) -> tuple[int, str]:
        if self._session is None:
            self._session = subprocess.Popen(
                [self._bin / "python", SESSION],
                cwd=self.folder,
                env=self._environment | self._quick,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        assert self._session.stdin and self._session.stdout
        self._session.stdin.write(json.dumps(text) + "\n")
        self._session.stdin.flush()
        while line := self._session.stdout.readline():
            if line.startswith("["):
                code, output = json.loads(line)
                return code, output
        return self._session.wait(), "the Python session ended"
