"""The environment variable ``LIGHTNING_RECORDER``, which turns recording on and off without a change to a program."""

from __future__ import annotations

import os

__all__ = ["CHECK", "CHECK_ONLY", "FACTORY_GROUPS", "VARIABLE", "is_default_set", "is_switched_off", "setting"]

VARIABLE = "LIGHTNING_RECORDER"
"""The name of the variable."""

FACTORY_GROUPS = ("lightning.pytorch.callbacks_factory", "pytorch_lightning.callbacks_factory")
"""The groups of entry points from which Lightning, under each of its names, adds callbacks to every Trainer."""

CHECK, CHECK_ONLY = "check", "check-only"
"""The values that add a check of the first training step; the second ends the program after it."""

_OFF = ("off", "0", "false", "no")
_ON = ("on", "1", "true", "yes")


def setting() -> str:
    """Return the value of the variable without surrounding white space; empty if it is not set."""
    return os.environ.get(VARIABLE, "").strip()


def is_switched_off() -> bool:
    """Return True if the variable is ``off``, ``0``, ``false`` or ``no``."""
    return setting().lower() in _OFF


def is_default_set(value: str) -> bool:
    """Return True if a value of the variable is ``on``, ``1``, ``true`` or ``yes``, which means the default set."""
    return value.lower() in _ON
