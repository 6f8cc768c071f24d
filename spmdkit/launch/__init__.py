"""Starting and supervising processes. `local` is this machine; other ways to start are other files."""

from spmdkit.launch.local import launch

__all__ = ["launch"]
