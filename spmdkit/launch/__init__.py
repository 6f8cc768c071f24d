"""Starts and supervises processes: `local` on this machine, `engines` on clusters."""

from spmdkit.launch.local import launch

__all__ = ["launch"]
