"""The digest of a user's project covers every module that the task imports."""

from spmdkit.config import load_config
from spmdkit.program import source_digest


def test_digest_covers_imported_project_modules(tmp_path):
    """Packages, imports within functions, relative and transitive imports are covered; installed packages are not."""
    (tmp_path / "models" / "parts").mkdir(parents=True)
    (tmp_path / "models" / "__init__.py").write_text("from . import net\n")
    (tmp_path / "models" / "net.py").write_text("def scale():\n    from .parts.last import SCALE\n    return SCALE\n")
    (tmp_path / "models" / "parts" / "last.py").write_text("import optax\nSCALE = 2\n")
    (tmp_path / "models" / "other.py").write_text("not imported\n")
    (tmp_path / "task.py").write_text("import models\n")
    (tmp_path / "run.yaml").write_text("task: task.py:task\nrun_dir: run\nsteps: 1\nbatch_size: 8\n")
    config = load_config(tmp_path / "run.yaml")
    names = ["models/__init__.py", "models/net.py", "models/parts/last.py", "task.py"]
    before = source_digest.digests(config)
    assert list(before) == names
    for name in names:
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text + "\n# changed\n")
        changed = source_digest.digests(config)
        assert [key for key in names if changed[key] != before[key]] == [name]
        (tmp_path / name).write_text(text)
    (tmp_path / "models" / "other.py").write_text("still not imported")
    assert source_digest.digests(config) == before
