"""The environment variable ``LIGHTNING_RECORDER``, which turns recording on and off without changing a program."""

from __future__ import annotations

import os

__all__ = ["CHECK_ONLY", "FACTORY_GROUPS", "VARIABLE", "is_check", "is_default_set", "is_switched_off", "setting"]

VARIABLE = "LIGHTNING_RECORDER"
"""The name of the variable."""

FACTORY_GROUPS = ("lightning.pytorch.callbacks_factory", "pytorch_lightning.callbacks_factory")
"""The entry-point groups from which Lightning adds callbacks to every Trainer, one for each of its package names."""

CHECK_ONLY = "check-only"
"""The value that checks the first training step of a program and then ends the program."""

_OFF = ("off", "0", "false", "no")
_ON = ("on", "1", "true", "yes")


def setting() -> str:
    """Return the value of the variable without surrounding white space; empty if it is not set."""
    return os.environ.get(VARIABLE, "").strip()


def is_switched_off() -> bool:
    """Return True if the variable is ``off``, ``0``, ``false`` or ``no``."""
    return setting().lower() in _OFF


def is_check() -> bool:
    """Return True if the variable asks for a check of the first training step."""
    return setting().lower() in ("check", CHECK_ONLY)


def is_default_set(value: str) -> bool:
    """Return True if a value of the variable is ``on``, ``1``, ``true`` or ``yes``, which means the default set."""
    return value.lower() in _ON
