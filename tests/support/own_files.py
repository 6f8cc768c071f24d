"""A user-defined reducer or sync in a file next to the config that names it."""

import sys

import spmdkit as sk


def config_by_choice(folder, monkeypatch, files, lines, key):
    """Writes `files` (name -> text), and returns a function from the value of `key` to the config of `lines` and that
    key."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, text in files.items():
        monkeypatch.delitem(sys.modules, f"spmdkit_task_{name.removesuffix('.py')}", raising=False)
        (folder / name).write_text(text)

    def load(value):
        (folder / "config.yaml").write_text(f"{lines}{key}: {value}\n")
        return sk.load_config(folder / "config.yaml")

    return load
