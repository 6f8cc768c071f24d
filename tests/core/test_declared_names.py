"""What a config names is called only where it is defined and declared: `task: os:system` must not run a command."""

import functools
import sys

import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError
from spmdkit.foundation import user_code
from spmdkit.program.task import load_task
from tests.support.messages import raises

KINDS = ("task", "hook", "reducer", "sync", "tracker")


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Returns a function that writes mine.py and finds a name in it."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def find(code, kind, name="made", instance=None):
        (tmp_path / "mine.py").write_text(f"import spmdkit as sk\n{code}\n")
        return user_code.find(f"mine.py:{name}", kind, tmp_path, instance)

    yield find
    for name in ("spmdkit_task_mine", "elsewhere"):
        sys.modules.pop(name, None)


def test_a_function_of_python_is_never_called(tmp_path):
    proof = tmp_path / "proof"
    with raises("os:system", found="is a function of", rule="@sk.task", repair="in a file of yours"):
        load_task("os", "system", tmp_path, {"command": f"touch {proof}"})
    with pytest.raises(ConfigError, match=r"subprocess:Popen is the class subprocess\.Popen"):
        load_task("subprocess", "Popen", tmp_path, {"args": ["touch", str(proof)]})
    assert not proof.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_function_is_found_by_its_decorator(kind, mine):
    name, other = kind, KINDS[KINDS.index(kind) - 1]
    assert mine(f"@sk.{name}\ndef made(): return 3", kind)() == 3
    assert getattr(sk, name) is getattr(user_code, name) and getattr(sk, name).__name__ == name
    sys.modules.pop("spmdkit_task_mine")
    with raises(found=f"with @sk.{other}", repair=f"@sk.{name} above its definition"):
        mine(f"@sk.{other}\ndef made(): return 3", kind)
    sys.modules.pop("spmdkit_task_mine")
    with raises(found="a function of mine", rule="its module registers"):
        mine("def made(): return 3", kind)


def test_what_another_module_declares_is_named_there(mine, tmp_path):
    (tmp_path / "elsewhere.py").write_text("import spmdkit as sk\n@sk.hook\ndef made(): pass\n")
    with pytest.raises(ConfigError, match="Name it where it is registered: elsewhere:made"):
        mine("from elsewhere import made", "hook")
    assert callable(user_code.find("elsewhere:made", "hook", tmp_path))


def test_objects_need_no_decorator_and_subclasses_do(mine):
    assert mine("made = frozenset([1])", "hook", instance=frozenset) == {1}
    sys.modules.pop("spmdkit_task_mine")
    with pytest.raises(ConfigError, match=r"is the class mine\.made"):
        mine("@sk.task\nclass First: pass\nclass made(First): pass", "task")


def test_decorated_functions_and_partials_are_registered(mine):
    code = "import functools\ndef twice(fn):\n    return functools.wraps(fn)(lambda: 2 * fn())\n"
    assert mine(f"{code}@twice\n@sk.hook\ndef made(): return 3", "hook")() == 6
    sys.modules.pop("spmdkit_task_mine")
    found = mine("import functools\nmade = sk.hook(functools.partial(max, 2))", "hook")
    assert isinstance(found, functools.partial)
    with raises("@sk.hook", found="a function of builtins", rule="registers a function"):
        sk.hook(max)


def test_a_file_of_task_and_hook_runs_once(mine, tmp_path):
    code = "import pathlib\nwith open(pathlib.Path(__file__).parent / 'runs', 'a') as f: f.write('1')\n"
    mine(f"{code}@sk.task\ndef made(): pass\n@sk.hook\ndef hooked(): pass", "task")
    user_code.find("mine.py:hooked", "hook", tmp_path)
    assert (tmp_path / "runs").read_text() == "1"
