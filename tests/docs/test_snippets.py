"""Every command, snippet and notebook of the site runs in a clean folder, and prints what the page shows."""

import re
import shutil

import pytest

from tests.docs.pages import DOCS, QUICK, READS_THE_PROGRAM, ROOT, Page, blocks, missing_line, sentences

pytestmark = pytest.mark.processes

SECTIONS = ("start", "howto", "coming_from", "reference")
SAMPLE = ("start/2_first_run.md", "howto/stop_and_resume.md", "howto/clusters/slurm.md", "coming_from/index.md")
"""Pages that run by default. The others are slow: `make docs` runs all."""

REAL = ("start/1_install.md", "start/2_first_run.md")
"""Pages whose commands start Python. The commands of the others are forked."""

PAGES = sorted(path.relative_to(DOCS).as_posix() for section in SECTIONS for path in (DOCS / section).rglob("*.md"))
PAGES = [page for page in PAGES if any(block.runs for block in blocks((DOCS / page).read_text()))]
TUTORIAL = sorted((DOCS / "tutorial").glob("*.md"))
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.tpu  # step 7 compiles for a TPU
def test_the_tutorial_runs_as_printed(tmp_path, warm):
    for path in TUTORIAL:
        Page(tmp_path, warm).run(path.read_text(), path.name)


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=() if page in SAMPLE else pytest.mark.slow) for page in PAGES]
)
def test_a_page_runs_as_printed(page, tmp_path, request):
    folder = () if page in REAL else (request.getfixturevalue("warm"),)
    Page(tmp_path, *folder).run((DOCS / page).read_text(), page)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    import nbclient
    import nbformat

    shutil.copytree(path.parent, tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("SPMDKIT", str(ROOT))
    if not READS_THE_PROGRAM.search(path.read_text()):
        for name, value in QUICK.items():
            monkeypatch.setenv(name, value)
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()


def test_the_sample_exists():
    assert set(SAMPLE) <= set(PAGES)


def test_the_runner_fails_where_a_page_is_wrong(tmp_path):
    page = "```bash\nexport WORD=one\necho $WORD 1.5 s in /tmp/x\n```\n\n```text\n{}\n```\n"
    Page(tmp_path).run(page.format("one 2.25 s in /home/run"), "page.md")
    Page(tmp_path).run(page.format("...") + "```bash\ntest $WORD = one; exit 3  # exit code 3\n```\n", "page.md")
    for wrong in ("two 1.5 s in /tmp/x", "one 1.5 s in /tmp/x\none 1.5 s in /tmp/x"):
        with pytest.raises(AssertionError, match=re.escape("page.md:6: no line of the output")):
            Page(tmp_path).run(page.format(wrong), "page.md")
    for wrong in ("```bash\nfalse\n```\n", "<!-- run: exit 1 -->\n", "```python\n1 / 0\n```\n"):
        with pytest.raises(AssertionError, match=r"page.md:1: exit code 1, expected 0"):
            Page(tmp_path).run(wrong, "page.md")


def test_a_python_session_and_files_belong_to_a_page(tmp_path):
    page = (
        "```python\n# names.py\nNAME = 'x'\n```\n```python\nfrom names import NAME\n```\n```python\nprint(NAME)\n```\n"
    )
    Page(tmp_path).run(page + "```text\nx\n```\n```python\n# not run: no GPU\n1 / 0\n```\n", "page.md")


COMMANDS = """```python
# script.py
import os, pathlib, signal, sys, time
print(__name__, sys.argv, sys.path[0], sys.stdin.read(), os.environ["WORD"])
print("error", file=sys.stderr)
if sys.argv[1:] == ["wait"]:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    pathlib.Path("pid").write_text(str(os.getpid()))
    time.sleep(1000)
sys.exit(3)
```
```bash
export WORD=word
echo input | python script.py one 2> errors || echo code $?
cat errors
python script.py wait & pid=$!
until [ -s pid ]; do sleep 0.02; done
kill $pid
wait $pid || echo code $?
rm pid; python script.py wait & pid=$!
until [ -s pid ]; do sleep 0.02; done
kill -KILL $pid
wait $pid 2> killed || echo code $?
while kill -0 $(cat pid) 2> gone; do sleep 0.02; done
```
```text
__main__ ['script.py', 'one'] PATH input
word
code 3
error
stopped
code 1
code 137
```
"""


@pytest.mark.parametrize("real", [True, False])
def test_a_forked_command_is_like_a_real_one(real, tmp_path, warm):
    Page(tmp_path, *(() if real else (warm,))).run(COMMANDS, "page.md")


def test_sentences_are_counted_without_code():
    text = (
        "# A heading\n\nOne two `a b c` four. Five six:\n\n- seven\n- eight nine\n\n```bash\nls a b\n```\n\n| a | b |\n"
    )
    assert sentences(text) == [4, 2, 1, 2]
    assert missing_line("a 1\n...\nb /x\nc ...", "a 2\nz\nb /y/z\nc d 5\n") is None
    assert missing_line("a\nc ... e", "a\nc d 5\n") == "c ... e"
