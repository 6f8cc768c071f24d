"""Configs of other projects, read setting by setting."""

from spmdkit.tools.migrate.command import migrate

__all__ = ["migrate"]
