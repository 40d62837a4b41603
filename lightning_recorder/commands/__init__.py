"""The command line: record a program, and list, show, export, draw and compare recordings."""

from lightning_recorder.commands.main import main

__all__ = ["main"]
