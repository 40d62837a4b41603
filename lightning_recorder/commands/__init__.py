"""Command line that lists, shows, exports, draws and compares recordings."""

from lightning_recorder.commands.main import main

__all__ = ["main"]
