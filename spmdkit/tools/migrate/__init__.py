"""Translates configs of other projects, setting by setting."""

from spmdkit.tools.migrate.command import migrate

__all__ = ["migrate"]
