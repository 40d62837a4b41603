"""Command line that lists, shows, exports, draws and compares recordings."""

from lightning_recorder.commands.line import main

__all__ = ["main"]
