"""Command line that records a program, and lists, shows, exports, draws and compares recordings."""

from lightning_recorder.commands.main import main

__all__ = ["main"]
