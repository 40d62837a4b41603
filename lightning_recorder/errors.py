"""What can go wrong, as one tree of exceptions.

::

    RecorderError                    anything this package raises on purpose
    ├── ArgumentError    (ValueError)    an argument that can never work; raised at construction
    ├── SelectionError   (ValueError)    a selection that matches no module; raised at fit start
    ├── FlowError        (RuntimeError)  a run's calls differ from the labelled ones
    ├── RecordingError   (RuntimeError)  recording a site failed; raised only with ``strict=True``
    ├── ForwardError     (RuntimeError)  the model raised while its graph was recorded; has the graph up to there
    ├── RenderError      (RuntimeError)  no renderer was found, or it failed
    └── DumpError        (ValueError)    a dump that cannot be read
    RecorderWarning      (UserWarning)   the same faults, told once while training goes on
"""

from __future__ import annotations

import logging
import pkgutil
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = [
    "ArgumentError",
    "DumpError",
    "FlowError",
    "ForwardError",
    "RecorderError",
    "RecorderWarning",
    "RecordingError",
    "RenderError",
    "SelectionError",
    "check_bool",
    "check_callable",
    "check_integer",
    "check_number",
    "check_some",
    "describe_error",
    "imported",
    "tell",
]

_log = logging.getLogger("lightning_recorder")


class RecorderError(Exception):
    """Base of every exception that this package raises on purpose."""


class ArgumentError(RecorderError, ValueError):
    """An argument has a value that can never work; the message names the allowed ones."""


class SelectionError(RecorderError, ValueError):
    """A selection matches no module; the message names the closest module names."""


class FlowError(RecorderError, RuntimeError):
    """A run's calls differ from the labelled ones; the message names the calls that are missing or extra."""


class RecordingError(RecorderError, RuntimeError):
    """Recording a site failed under ``strict=True``; the message names the site."""


class ForwardError(RecorderError, RuntimeError):
    """The model raised while its graph was recorded.

    Args:
        message: What it raised, and in which module.
        graph: A :class:`lightning_recorder.graph.Graph` of what was done until then, the failed nodes marked.
    """

    def __init__(self, message: str, graph: Any) -> None:
        super().__init__(message)
        self.graph = graph

    def __reduce__(self) -> tuple[type[ForwardError], tuple[str, Any]]:
        return type(self), (str(self), self.graph)


class RenderError(RecorderError, RuntimeError):
    """A graph could not be drawn; the message says how to get a picture."""


class DumpError(RecorderError, ValueError):
    """A dump is damaged or is not one of ours."""


class RecorderWarning(UserWarning):
    """A fault of the recorder that cost a record or a picture, never the run."""


def tell(message: str) -> None:
    """Warn with :class:`RecorderWarning`, even where warnings are turned into errors.

    Note:
        Under ``python -W error`` a warning is an exception. Raised from a hook it would end the training run that the
        warning only comments on, so there it is logged as an error of the logger ``lightning_recorder`` instead.
    """
    try:
        warnings.warn(message, RecorderWarning, stacklevel=2)
    except Exception:  # noqa: BLE001 - the warning itself, or what an application puts in the place of showing it raises
        _log.error(message)


def check_bool(name: str, value: object) -> None:
    """Refuse an argument that is neither True nor False, such as a text that says no and counts as yes.

    Raises:
        ArgumentError: Naming the argument and what is allowed.
    """
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} must be True or False, got {value!r}")


def check_integer(name: str, value: object, least: int) -> None:
    """Refuse an argument that is no integer of at least ``least``.

    Raises:
        ArgumentError: Naming the argument and what is allowed.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(f"{name} must be an integer of at least {least}, got {value!r}")


def check_number(name: str, value: object, least: float) -> None:
    """Refuse an argument that is no number of at least ``least``.

    Raises:
        ArgumentError: Naming the argument and what is allowed.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= least:
        raise ArgumentError(f"{name} must be a number of at least {least:g}, got {value!r}")


def check_callable(name: str, value: object, arguments: str) -> None:
    """Refuse an argument that is no function.

    Raises:
        ArgumentError: Naming the argument and what it is called with.
    """
    if not callable(value):
        raise ArgumentError(f"{name} takes a function {arguments}, got {value!r}")


def check_some(name: str, value: object, known: Sequence[str]) -> tuple[str, ...]:
    """Some of the known words, of which a single one may stand alone.

    Raises:
        ArgumentError: Naming the argument and what is allowed.
    """
    chosen = (value,) if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
    if not chosen or not all(each in known for each in chosen):
        got = ", ".join(map(repr, chosen)) or "none"
        raise ArgumentError(f"{name} takes some of {', '.join(map(repr, known))}; got {got}")
    return tuple(str(each) for each in chosen)


def imported(name: str, value: object) -> object:
    """The object itself, where it is given by its import path, as ``"package.module.function"``.

    Raises:
        ArgumentError: If a path leads nowhere; naming the argument.
    """
    if not isinstance(value, str):
        return value
    try:
        return pkgutil.resolve_name(value)
    except Exception as error:
        raise ArgumentError(f"the {name} {value!r} cannot be imported: {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """The class and the text of an error, which may be one that has no text to give."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - whatever an error's own __str__ raises
        return type(error).__name__
