"""A wrapper for a user's objects, so that the object that holds them can be copied, pickled or written as YAML."""

from __future__ import annotations

import importlib
import pickle
import threading
from typing import Any, NoReturn

from lightning_recorder.errors import RecordingError

__all__ = ["Lost", "Portable", "unwrap"]


class Lost:
    """Placeholder for a function that could not be pickled."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __repr__(self) -> str:
        return f"<lost: {self.what}>"

    def __call__(self, *args: object) -> NoReturn:
        """Raise an error that explains how to avoid the loss.

        Raises:
            RecordingError: Always.
        """
        raise RecordingError(
            f"{self.what} is missing in this copy of the recorder, because it cannot be pickled: give a function that "
            "is defined at the top level of a module, or its import path"
        )


class Portable:
    """Wrapper around a user's object, such as a function, so that the owner of the object can be copied and pickled.

    ``copy.copy`` and ``copy.deepcopy`` share the wrapped object. A pickle contains the object if ``pickle`` or, where
    installed, ``cloudpickle`` can store it. Otherwise, or if it cannot be restored, a :class:`Lost` replaces it. A
    lambda therefore never prevents its owner, such as the hyperparameters in a checkpoint, from being saved.
    """

    def __init__(self, value: Any, argument: str) -> None:
        self.value = value
        self.argument = argument

    def __str__(self) -> str:
        value = self.value
        if isinstance(value, Lost):
            return value.what
        code = getattr(value, "__code__", None)
        if code is not None:
            return f"{self.argument}={value.__name__} ({code.co_filename}:{code.co_firstlineno})"
        named = value if hasattr(value, "__qualname__") else type(value)
        return f"{self.argument}={named.__module__}.{named.__qualname__}"

    @property
    def is_plain(self) -> bool:
        """True if ``pickle`` alone can store the object, such as an importable function."""
        return _pickled_by("pickle", self.value) is not None

    def __deepcopy__(self, memo: dict[int, Any]) -> Portable:
        return self

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _restore, (_pickled(self.value), str(self), self.argument)


class _Busy(threading.local):
    def __init__(self) -> None:
        self.values: set[int] = set()
        """Ids of the objects that this thread is pickling."""


_busy = _Busy()


def _pickled(value: Any) -> bytes | None:
    """Pickle an object; return None if that is impossible, or if the object contains its own wrapper."""
    if isinstance(value, Lost) or id(value) in _busy.values:
        return None
    _busy.values.add(id(value))
    try:
        return _pickled_by("pickle", value) or _pickled_by("cloudpickle", value)
    finally:
        _busy.values.discard(id(value))


def _pickled_by(module: str, value: Any) -> bytes | None:
    try:
        return bytes(importlib.import_module(module).dumps(value))
    except Exception:  # noqa: BLE001 - pickling an object may raise anything
        return None


def _restore(data: bytes | None, what: str, argument: str) -> Portable:
    """Unpickle a wrapped object."""
    try:
        return Portable(Lost(what) if data is None else pickle.loads(data), argument)
    except Exception:  # noqa: BLE001 - the object's module may be missing, or may raise on import
        return Portable(Lost(what), argument)


def unwrap(value: Any) -> Any:
    """Return the object in a :class:`Portable`. Convert a string to :class:`Lost`; return other objects unchanged."""
    if isinstance(value, str):
        return Lost(value)
    return value.value if isinstance(value, Portable) else value
