"""The callback factory that Lightning calls for every Trainer of every program in the environment.

Unless the variable ``LIGHTNING_RECORDER`` asks for recorders, it imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

from lightning_recorder.switch import VARIABLE, is_switched_off, setting

__all__ = ["callbacks_from_environment"]


def callbacks_from_environment() -> list[Any]:
    """Return the callback that adds recorders to a trainer if ``LIGHTNING_RECORDER`` asks for them, otherwise nothing.

    Never raises: an error gives one warning, and the program continues without recorders.
    """
    if not setting() or is_switched_off():
        return []
    try:
        from lightning_recorder.callbacks.attach import AttachRecorders

        return [AttachRecorders()]
    except Exception as error:  # noqa: BLE001 - the program must not end because of a recorder
        with contextlib.suppress(Exception):  # python -W error turns the warning into an exception
            warnings.warn(f"{VARIABLE}={setting()}: nothing is recorded, {error!r}", stacklevel=2)
        return []
