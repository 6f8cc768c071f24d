"""`make versions-matrix`: the tests on each pair of Python and jax that is supported, in environments of their own in
build/versions.

    python benchmarks/versions_matrix.py [--only 3.13-0.12] [PYTEST ARGUMENT ...]     # none: what `make quick` runs

All other packages are those of constraints.txt, but flax: 0.12.8 imports on jax 0.10 alone. What came out is printed as
the rows of the table in docs/measured/versions.md, and kept with pytest's own report in build/versions.
"""

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build/versions"
PAIRS = (("3.11", "0.10.2"), ("3.12", "0.11.*"), ("3.13", "0.12.*"))
"""Python and jax, the oldest first. jax 0.12 needs Python 3.12."""

MAKE_S, TEST_S = 1200, 5400
"""What an environment, and its tests, may take."""

QUICK = ["-m", "not slow and not processes", "--numprocesses", "2", "--dist", "loadfile"]


def python_of(version):
    """Returns an interpreter of that version: on the path, or one of pyenv's; None where there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"versions/{version}*/bin/python"), reverse=True)]
    for python in filter(None, found):  # one of pyenv's shims may be there for a version that is not
        shown = subprocess.run([python, "--version"], capture_output=True, text=True, timeout=60, check=False)
        if shown.stdout.startswith(f"Python {version}."):
            return str(python)
    return None


def environment(python, folder, jax):
    """Returns the Python of an environment with that jax, made on first use and when pyproject.toml or constraints.txt
    is newer."""
    done, made = folder / ".made", folder / "bin/python"
    if not (
        done.exists()
        and done.stat().st_mtime > max((ROOT / name).stat().st_mtime for name in ("pyproject.toml", "constraints.txt"))
    ):
        folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([python, "-m", "venv", folder], check=True, timeout=MAKE_S)
        others, oldest = folder / "constraints.txt", jax == PAIRS[0][1]
        lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
        not_held = "jax|jaxlib|libtpu" + ("" if oldest else "|flax")
        others.write_text("".join(line for line in lines if not re.match(rf"({not_held})==", line)))
        pip = [made, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
        asked = [f"jax=={jax}", f"jaxlib=={jax}", *([] if oldest else ["flax>=0.12.12"]), "--editable", f"{ROOT}[test]"]
        subprocess.run([*pip, "--constraint", others, *asked], check=True, timeout=MAKE_S)
        done.touch()
    return made


def tested(python, arguments, report):
    """Returns pytest's exit code and the counts that it told."""
    command = [python, "-m", "pytest", *arguments]
    with report.open("w") as file:
        try:
            code = subprocess.run(
                command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=TEST_S, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    last = report.read_text(errors="replace").strip().splitlines()[-1:]
    counts = {name: int(number) for number, name in re.findall(r"(\d+) (passed|failed|skipped|errors?)", *last or [""])}
    return code, counts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="one pair, as 3.13-0.12")
    asked, arguments = parser.parse_known_args()
    wrong = []
    for version, jax in PAIRS:
        name = f"{version}-{jax.removesuffix('.*')}"
        if asked.only not in (None, name):
            continue
        python = python_of(version)
        if python is None:
            wrong.append(f"no Python {version}: install it, or put python{version} on the path")
            continue
        made = environment(python, BUILD / name, jax)
        code, counts = tested(made, arguments or QUICK, BUILD / f"{name}.log")
        show = (
            "import json, platform, jax, jaxlib; print(json.dumps([platform.python_version(), jax.__version__, "
            "jaxlib.__version__]))"
        )
        versions = json.loads(subprocess.run([made, "-c", show], capture_output=True, text=True, check=True).stdout)
        numbers = [counts.get(kind, 0) for kind in ("passed", "failed", "skipped")]
        print(f"| {datetime.date.today()} | " + " | ".join(map(str, [*versions, *numbers])) + " |", flush=True)
        if code:
            wrong.append(f"{name}: pytest ended with {code}, see {BUILD / name}.log")
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
