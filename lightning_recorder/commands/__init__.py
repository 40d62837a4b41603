"""The command line: what runs have recorded, listed, shown, exported, drawn and compared."""

from lightning_recorder.commands.line import main

__all__ = ["main"]
