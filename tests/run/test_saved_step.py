"""A run starts from the compiled step of `plan --save-compiled`, or names why not and compiles."""

import jax
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError
from spmdkit.plan.command import PlanOptions, run_plan
from spmdkit.program import compiler, saved_step
from spmdkit.program.saved_step import NAME, load_step, save_step
from tests.support.plan_files import write
from tests.support.small_runs import config_of, line_task, lines, train

TWO = {"steps": 2, "checkpoint": None, "log": {"every_steps": 1, "progress": "plain"}}


def opened(folder, **changes):
    """Returns the program of the small run."""
    config = config_of(folder, **TWO | changes)
    return sk.build(config, line_task(), jax.devices("cpu")[:2])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder with the compiled step, made once, while JAX's compile cache has the step."""
    folder = tmp_path_factory.mktemp("saved") / "private"
    assert opened(folder).compiled
    save_step(opened(folder), folder)
    return folder


def test_a_run_starts_from_the_saved_step(saved, tmp_path, capsys, monkeypatch):
    compiled = []
    real = compiler.compile
    monkeypatch.setattr(
        compiler, "compile", lambda lowered, *a: compiled.append(lowered.as_text()) or real(lowered, *a)
    )
    names = lambda: sorted(text.split("@jit_")[1].split()[0] for text in compiled)
    for name, cache in (("with", {"saved": str(saved)}), ("without", {})):
        (tmp_path / name).mkdir()
        train(tmp_path / name, **TWO, compile_cache=cache)
        assert ("train_step" in names()) == (name == "without")
        assert (f"the compiled step is read from {saved / NAME}" in capsys.readouterr().out) == (name == "with")
        compiled.clear()
    recorded = [lines(tmp_path / name, "metrics.jsonl") for name in ("with", "without")]
    losses = [[line["loss"] for line in each if "split" not in line] for each in recorded]
    assert losses[0] == losses[1] and len(losses[0]) == 2


def refusal(folder, **changes):
    """Returns why the saved step is not used."""
    compiled, line = load_step(opened(folder.parent, **changes), folder)
    assert compiled is None and "is compiled" in line and "\n" not in line
    return line


def test_what_differs_is_named(saved, monkeypatch):
    assert "is of another step (program " in refusal(saved, batch_size=64)
    with monkeypatch.context() as patched:
        patched.setattr(jax, "__version__", "9.9.9")
        assert "(jax " in (line := refusal(saved)) and "here 9.9.9" in line
    with monkeypatch.context() as patched:
        patched.setattr("spmdkit.program.compile_cache.machine", lambda: "another")
        assert "compiler " in refusal(saved)


def test_an_unsafe_or_damaged_file_is_not_unpickled(saved, monkeypatch):
    monkeypatch.setattr(saved_step.serialize_executable, "deserialize_and_load", lambda *_: pytest.fail("unpickled"))
    file = saved / NAME
    content = file.read_bytes()
    saved.chmod(0o755)
    assert "is open to others (mode 755)" in refusal(saved)
    saved.chmod(0o700)
    for damaged in (content[:-1], content[:-9] + b"x" + content[-8:], b"", content[:40]):
        file.write_bytes(damaged)
        assert "is damaged" in refusal(saved)
    file.unlink()
    assert "No such file" in refusal(saved)
    file.write_bytes(content)


def test_plan_writes_only_to_a_private_folder(tmp_path, capsys):
    path = write(tmp_path)
    run_plan(path, [], PlanOptions(save_compiled=tmp_path / "new"))
    assert ((tmp_path / "new").stat().st_mode & 0o777, (tmp_path / "new" / NAME).stat().st_mode & 0o777) == (
        0o700,
        0o600,
    )
    assert str(tmp_path / "new") in capsys.readouterr().out
    (tmp_path / "open").mkdir(mode=0o755)
    for options, message in (
        ({"save_compiled": tmp_path / "open"}, r"is open to others .* chmod 700"),
        ({"save_compiled": tmp_path / "new", "target": "gpu:h100:8"}, "has no effect for gpu:h100:8"),
        ({"save_compiled": tmp_path / "new", "search": True}, "writes the step of one plan"),
    ):
        with pytest.raises(ConfigError, match=message):
            run_plan(path, [], PlanOptions(**options))
