"""Random configs, files and damage from a seed, and the requirements on each command: an expected exit code, at most 25
lines, no traceback, at most 3 seconds.

    python -m tests.support.fuzz --seed 0 --count 3000        `make fuzz`
    python -m tests.support.fuzz --seed 0 --case 1234         one of them again, with what it said

A case depends only on (seed, number). All cases run in this process, through the full command line except `os._exit`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

from spmdkit import cli
from spmdkit.config import json_schema
from spmdkit.errors import OUTCOMES, ExitCode
from spmdkit.faults import exit_handler

MAX_LINES, MAX_S = 25, 3.0
USAGE = int(ExitCode.USAGE)
"""Exit code of click for a command line that it cannot parse."""

TASK = """
import jax.numpy as jnp, numpy as np, optax, spmdkit as sk
x = np.ones((32, 3), np.float32)
task = sk.Task(lambda key: {"w": jnp.zeros(3), "b": jnp.zeros(())}, lambda p, b, key: sk.mean((b @ p["w"] + p["b"] - 1) ** 2), optax.adam(0.1), train_data=x)

@sk.task
def make(width=3, name="x"): return task
"""
CONFIG = {
    "task": "task.py:task",
    "run_dir": "run",
    "steps": 2,
    "batch_size": 8,
    "devices": "cpu:2",
    "mesh": {"data": 2},
    "log": {"progress": "off"},
}


class ExitCalled(BaseException):
    """Raised in place of `os._exit`."""


class Case(NamedTuple):
    """A command in a prepared folder, and the expected exit codes."""

    kind: str
    command: list[str]
    codes: set[int]
    said: str


class Ran(NamedTuple):
    """How a command ended."""

    code: int
    output: str
    error: str
    seconds: float


def run(command: list[str]) -> Ran:
    """Runs a command and returns how it ended."""
    out, err, left = io.StringIO(), io.StringIO(), []

    def exit_process(code: int) -> None:
        left.append(code)
        raise ExitCalled

    real, exit_handler.exit_process = exit_handler.exit_process, exit_process  # type: ignore[assignment]
    path, begin = list(sys.path), time.process_time()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = cli.main(command) or 0
            except ExitCalled:
                code = left[0]
    finally:
        exit_handler.exit_process = real
        sys.path[:] = path
    return Ran(int(code), out.getvalue(), err.getvalue(), time.process_time() - begin)


def wrong(case: Case, ran: Ran) -> list[str]:
    """Returns the violated requirements."""
    text = ran.output + ran.error
    found = []
    if ran.code not in case.codes:
        found.append(f"code {ran.code}, right would be {sorted(case.codes)}")
    if ran.code != 0 and not ran.error.strip():
        found.append("nothing was said")
    if "Traceback" in text or exit_handler.BUG in text:
        found.append("a traceback")
    if len(ran.error.splitlines()) > MAX_LINES:
        found.append(f"{len(ran.error.splitlines())} lines")
    if any(ord(c) < 32 and c not in "\n\t" for c in text):
        found.append("a control character")
    if ran.seconds > MAX_S:
        found.append(f"{ran.seconds:.1f} s")
    return found


# ---- generators ------------------------------------------------------------------------------------------------------

ODD = [
    None, True, False, 0, -1, 1, 2**31, 10**40, 1.5, -0.0, 1e308, float("nan"), float("inf"), "", " ", "x", "1", "true", "null", "auto", "~", "/", "..",
    "../..", "\x00", "\x1b[2J", "\ud800", "\u202e", "é" * 90, "a" * 300, "x" * 20_000, "$(id)", "${HOME}", "os:system", "%s%n", "cpu:0", "cpu:99999", "{}",
    [], [1], ["x"] * 50, {}, {"": 1}, {"a": {"b": {"c": 1}}}, [[[[[]]]]], {"x": None}, [None, None], {1: 2}, "2024-01-01", "0x10", "1_000", "1e5", "***",
]  # fmt: skip


def keys() -> Iterator[tuple[str, ...]]:
    """Yields the path of every key of a config."""
    schema = json_schema()

    def walk(node: dict, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        options = [node, *node.get("anyOf", []), *node.get("allOf", [])]
        for option in options:
            if "$ref" in option:
                option = schema["$defs"][option["$ref"].rsplit("/", 1)[1]]
            for name, inner in option.get("properties", {}).items():
                yield (*path, name)
                if len(path) < 3:
                    yield from walk(inner, (*path, name))

    yield from dict.fromkeys(walk(schema, ()))


KEYS = list(keys())


def _write(folder: Path, value: object, name: str = "c.yaml") -> Path:
    text = value if isinstance(value, str) else yaml.safe_dump(value, allow_unicode=True)
    path = folder / name
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return path


def _with(config: dict, path: tuple[str, ...], value: object) -> dict:
    inner = config = json.loads(json.dumps(config))
    for name in path[:-1]:
        if not isinstance(inner.get(name), dict):
            inner[name] = {}
        inner = inner[name]
    inner[path[-1]] = value
    return config


def odd_value(draw: random.Random, folder: Path) -> Case:
    """A config with one to three odd values."""
    config, chosen = CONFIG, []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        path, value = draw.choice(KEYS), draw.choice(ODD)
        if draw.random() < 0.2:
            path = (*path[:-1], _typo(draw, path[-1]))
        config, chosen = _with(config, path, value), [*chosen, (".".join(path), value)]
    try:
        text: object = yaml.safe_dump(config, allow_unicode=True)
    except yaml.YAMLError:
        text = json.dumps(config)
    _write(folder, text)
    return Case("odd value", ["config", draw.choice(("check", "show")), "c.yaml"], {0, 78}, f"{chosen!r:.200}")


def _typo(draw: random.Random, word: str) -> str:
    at = draw.randrange(len(word))
    typos = (word[:at] + word[at + 1 :], word[:at] + draw.choice("xyz_-. ") + word[at:], word.upper(), word + "s")
    return draw.choice(typos) or "x"


def odd_text(draw: random.Random, folder: Path) -> Case:
    """A config file with damaged bytes, or that is not a config."""
    text = yaml.safe_dump(CONFIG).encode()
    whole = [
        b"", b"\x00", b"\xff\xfe\x00t", b"[" * 100_000, b"{a: " * 5_000, b"- x", b"5", b"a: &a [*a]", b"x: !!python/object/apply:os.system [id]", b"<<: *x", b"? [a]\n: 1",
        b"task: a.py:t\ntask: b.py:t", b"%YAML 9.9\n---\n", b"---\na: 1\n---\nb: 2", b"\t\tx: 1", b"a: 'x", b"x" * 300_000, "a: \u2028b".encode(), b"true: 1", b"\x1b[2J: 1",
    ]  # fmt: skip
    if draw.random() < 0.4:
        text = draw.choice(whole)
    else:
        text = _damaged(draw, text)
    (folder / "c.yaml").write_bytes(text)
    return Case("odd text", ["config", "check", "c.yaml"], {0, 78}, f"{text[:120]!r}")


def _damaged(draw: random.Random, content: bytes) -> bytes:
    """Returns bytes truncated, changed at some positions, doubled, or with inserted bytes."""
    way, at = draw.randrange(6), draw.randrange(len(content) + 1)
    if way == 0:
        return content[:at]
    if way == 1:
        found = bytearray(content)
        for _ in range(draw.choice((1, 1, 5, 50)) if content else 0):
            found[draw.randrange(len(found))] ^= 1 << draw.randrange(8)
        return bytes(found)
    if way == 2:
        return content[:at] + draw.randbytes(draw.choice((1, 10, 1000))) + content[at:]
    if way == 3:
        return content + content
    if way == 4:
        return draw.choice(
            [b"", b"\x00" * 100, b"null", b"[]", b"5", b"{}", b"[" * 100_000, b'{"a":' * 100_000, b'"x"', b"\xff"]
        )
    return content.replace(
        *draw.choice(((b":", b"::"), (b"{", b"["), (b"1", b"-1e999"), (b'"', b"'"), (b"a", b"\x1b[2J"), (b"\n", b"\r")))
    )


def odd_override(draw: random.Random, folder: Path) -> Case:
    """Overrides on the command line."""
    _write(folder, CONFIG)
    words = []
    for _ in range(draw.choice((1, 2, 4))):
        key, value = ".".join(draw.choice(KEYS)), draw.choice(ODD)
        shown = value if isinstance(value, str) else json.dumps(value)
        shown = "".join(c for c in shown if c != "\x00" and not 0xD800 <= ord(c) < 0xE000)
        forms = (
            f"{key}={shown}",
            f"{key}:{shown}",
            f"={shown}",
            f"{key}.x={shown}",
            key,
            f"{key}=[{shown}",
            f"{key}==",
        )
        words.append(draw.choice(forms))
    return Case("odd override", ["config", "check", "c.yaml", *words], {0, 78, USAGE}, f"{words!r:.200}")


def odd_command(draw: random.Random, folder: Path) -> Case:
    """Commands with invalid combinations of words."""
    _write(folder, CONFIG)
    words = ["train", "eval", "plan", "layout", "verify", "launch", "report", "checkpoint", "config", "ls", "inspect", "export", "check", "--json", "--help", "-n", "--step", "--target", "gpu:h100:8", "no.yaml", "run", "5", "", "--", "-x", "\x1b[2J", "a" * 300, "--format", "--all", "tpu:v5p", "/dev/null", "."]  # fmt: skip
    chosen = [draw.choice(words) for _ in range(draw.randrange(1, 5))]
    if chosen[0] in ("launch", "doctor"):  # starts processes
        chosen[0] = "report"
    return Case("odd command", chosen, {0, USAGE, 78, 79, 74}, f"{chosen!r:.200}")


COMMANDS: list[tuple[list[str], set[int]]] = [
    (["checkpoint", "ls", "run"], {0, 78}),
    (["checkpoint", "ls", "run", "--json"], {0, 78}),
    (["checkpoint", "inspect", "run"], {0, 78, 79}),
    (["checkpoint", "inspect", "run", "--step", "2"], {0, 78, 79}),
    (["checkpoint", "export", "run", "out.safetensors"], {0, 74, 78, 79}),
    (["checkpoint", "verify", "run"], {0, 78, 79}),
    (["report", "run"], {0, 78}),
    (["plan", "run/plan.json"], {0, 78}),
    (["plan", "run/plan.json", "--diff", "run/plan.json"], {0, 78}),
    (["config", "check", "run/config.yaml"], {0, 78}),
]
SLOW: list[tuple[list[str], set[int]]] = [
    (["train", "c.yaml", "steps=3"], {0, 74, 78, 79}),
    (["eval", "c.yaml"], {0, 78, 79}),
]


def odd_run(draw: random.Random, folder: Path, slow: bool = False) -> Case:
    """A run's directory with damaged, missing or strange entries."""
    _write(folder, CONFIG)
    found = sorted((path for path in (folder / "run").rglob("*") if path.name != "run.lock"), key=str)
    said = []
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        path = draw.choice(found)
        said.append(_spoil(draw, path))
    command, codes = draw.choice(SLOW if slow else COMMANDS)
    return Case("damaged run, trained on" if slow else "damaged run", command, codes, f"{'; '.join(said)} of {folder}")


def _spoil(draw: random.Random, path: Path) -> str:
    way = draw.choice(("bytes", "bytes", "bytes", "types", "types", "gone", "folder", "link", "loop", "beside"))
    if not path.parent.is_dir() or path.is_symlink():
        return f"{path.name} was gone"
    if way == "beside":
        names = [
            "7",
            "007",
            "1e3",
            "-1",
            "9" * 30,
            "3.orbax-checkpoint-tmp",
            "odd\x1b[2J",
            "x" * 200,
            ".hidden",
            "2.damaged",
        ]
        name = draw.choice(names)
        with contextlib.suppress(OSError):
            (path.parent / name).mkdir()
        return f"{name[:40]!r} beside {path.name}"
    before = path.read_bytes() if path.is_file() else b""
    if way in ("bytes", "types") and path.is_file():
        path.write_bytes(_other_types(draw, before) if way == "types" else _damaged(draw, before))
        return f"{way} of {path.name}"
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if way == "folder":
        path.mkdir()
    elif way in ("link", "loop"):
        path.symlink_to(path.name if way == "loop" else "/etc/passwd")
    return f"{way} for {path.name}"


def _other_types(draw: random.Random, content: bytes) -> bytes:
    """Returns JSON with some values of another type. Bytes that are not JSON are damaged."""
    try:
        is_lines = content.count(b"\n") > 1 and content[:2] != b"{\n"
        lines = [json.loads(line) for line in (content.splitlines() if is_lines else [content])]
    except ValueError:
        return _damaged(draw, content)

    def change(value: object, depth: int = 0) -> object:
        if isinstance(value, dict) and value and (depth < 1 or draw.random() < 0.8):
            name = draw.choice(list(value))
            return {**value, name: change(value[name], depth + 1)}
        if isinstance(value, list) and value and draw.random() < 0.7:
            at = draw.randrange(len(value))
            return [*value[:at], change(value[at], depth + 1), *value[at + 1 :]]
        return draw.choice([odd for odd in ODD if not (isinstance(odd, str) and "\ud800" in odd)])

    return "\n".join(json.dumps(change(line)) for line in lines).encode()


KINDS: list[tuple[Callable[..., Case], int]] = [
    (odd_value, 30),
    (odd_text, 15),
    (odd_override, 15),
    (odd_command, 5),
    (odd_run, 35),
]


class Fuzz:
    """A folder with a trained run, which is copied for each case."""

    def __init__(self, root: Path, seed: int):
        self.root, self.seed = root, seed
        (root / "model").mkdir()
        (root / "model/task.py").write_text(TASK)
        _write(root / "model", CONFIG)
        before = Path.cwd()
        os.chdir(root / "model")
        ran = run(["train", "c.yaml"])
        os.chdir(before)
        assert ran.code == 0, ran.error

    def case(self, number: int, slow: bool = False) -> tuple[Case, Ran, list[str]]:
        """Returns a case, how it ended, and the violated requirements."""
        draw = random.Random(f"{self.seed}/{number}")
        folder = self.root / f"case-{number}"
        shutil.copytree(self.root / "model", folder)
        before = Path.cwd()
        os.chdir(folder)
        try:
            if slow:
                case = odd_run(draw, folder, slow=True)
            else:
                case = draw.choices([kind for kind, _ in KINDS], [weight for _, weight in KINDS])[0](draw, folder)
            ran = run(case.command)
        finally:
            os.chdir(before)
            shutil.rmtree(folder, ignore_errors=True)
        return case, ran, wrong(case, ran)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--slow", type=int, default=40, help="of them, runs that are trained on or evaluated")
    parser.add_argument("--case", type=int)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="spmdkit-fuzz-") as root:
        fuzz = Fuzz(Path(root), asked.seed)
        if asked.case is not None:
            case, ran, problems = fuzz.case(asked.case, asked.case < asked.slow)
            print(case, f"code {ran.code}", ran.output[-2000:], ran.error[-8000:], problems, sep="\n")
            return bool(problems)
        kinds, codes, bad, slowest = collections.Counter[str](), collections.Counter[int](), 0, 0.0
        for number in range(asked.count):
            case, ran, problems = fuzz.case(number, number < asked.slow)
            kinds[case.kind] += 1
            codes[ran.code] += 1
            slowest = max(slowest, ran.seconds)
            if problems:
                bad += 1
                print(
                    f"case {number}: {case.kind}: {' '.join(case.command)[:100]!r}: {case.said[:160]}: {', '.join(problems)}",
                    flush=True,
                )
    words = {int(code): word for code, word in OUTCOMES.values()} | {0: "done"}
    print(f"{asked.count} cases of seed {asked.seed}: {bad} wrong; slowest {slowest:.2f} s of the processor")
    print(", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
    print(", ".join(f"{count} x {code} ({words.get(code, '?')})" for code, count in sorted(codes.items())))
    return int(ExitCode.CHECK_FAILED) if bad else 0


if __name__ == "__main__":
    sys.exit(main())
