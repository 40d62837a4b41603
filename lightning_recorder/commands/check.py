"""``check``: answer questions about the first fit of a program, before a long training."""

from __future__ import annotations

from argparse import Namespace
from typing import TextIO

from lightning_recorder.commands.run import start
from lightning_recorder.switch import CHECK_ONLY

__all__ = ["run"]


def run(arguments: Namespace, out: TextIO) -> int:
    """Replace this process by ``python PROGRAM ARGS``, which ends when its first fit has been checked.

    Raises:
        ArgumentError: If there is no program, or if Lightning would not find the callback.
    """
    return start(arguments, CHECK_ONLY, out)
