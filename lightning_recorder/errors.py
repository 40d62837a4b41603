"""The tree of exceptions.

::

    RecorderError                    base of every error that this package raises on purpose
    ├── ArgumentError    (ValueError)    an argument has an invalid value; raised at construction
    │   ├── UnknownArgumentError (TypeError) an argument does not exist; the message names the closest one
    │   └── InputError   (RuntimeError)      a model cannot be run with the given inputs, device or mode
    │       └── InputTypeError (TypeError)   an input has the wrong type
    ├── SelectionError   (ValueError)    a selection matches no module; raised at fit start
    ├── FlowError        (RuntimeError)  a run's calls differ from the labeled ones
    ├── RecordingError   (RuntimeError)  recording a site failed; raised only with ``strict=True``
    ├── ForwardError     (RuntimeError)  the model raised while its graph was recorded; has the graph up to there
    ├── RenderError      (RuntimeError)  no renderer was found, or it failed
    └── DumpError        (ValueError)    a dump cannot be read
    RecorderWarning      (UserWarning)   the same faults as a single warning while training continues
"""

from __future__ import annotations

import difflib
import inspect
import logging
import math
import pkgutil
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from lightning_recorder.privacy import hide_secrets

__all__ = [
    "ArgumentError",
    "DumpError",
    "FlowError",
    "ForwardError",
    "InputError",
    "InputTypeError",
    "RecorderError",
    "RecorderWarning",
    "RecordingError",
    "RenderError",
    "SelectionError",
    "UnknownArgumentError",
    "check_bool",
    "check_callable",
    "check_integer",
    "check_number",
    "check_some",
    "checked_depth",
    "closest",
    "describe_call",
    "describe_error",
    "describe_missing",
    "did_you_mean",
    "imported",
    "warn",
]

_log = logging.getLogger("lightning_recorder")


class RecorderError(Exception):
    """Base of every exception that this package raises on purpose."""


class ArgumentError(RecorderError, ValueError):
    """An argument has an invalid value; the message names the allowed values."""


class UnknownArgumentError(ArgumentError, TypeError):
    """An argument does not exist; the message names the closest one."""


class InputError(ArgumentError, RuntimeError):
    """A model cannot be run with the given inputs, device or mode; the message explains how to pass them."""


class InputTypeError(InputError, TypeError):
    """An input for a run of a model has the wrong type."""


class SelectionError(RecorderError, ValueError):
    """A selection matches no module; the message names the closest module names."""


class FlowError(RecorderError, RuntimeError):
    """The calls of a run differ from the labeled calls; the message names the missing and extra calls."""


class RecordingError(RecorderError, RuntimeError):
    """Recording a site failed under ``strict=True``; the message names the site."""


class ForwardError(RecorderError, RuntimeError):
    """The model raised while its graph was recorded.

    Args:
        message: The model's error and the module that raised it.
        graph: A :class:`lightning_recorder.graph.Graph` of the operations up to the error, with the failed nodes
            marked.
    """

    def __init__(self, message: str, graph: Any) -> None:
        super().__init__(message)
        self.graph = graph

    def __reduce__(self) -> tuple[type[ForwardError], tuple[str, Any]]:
        return type(self), (str(self), self.graph)


class RenderError(RecorderError, RuntimeError):
    """A graph could not be rendered; the message explains how to get an image."""


class DumpError(RecorderError, ValueError):
    """A dump is damaged or was not written by this package."""


class RecorderWarning(UserWarning):
    """An error in a recorder that loses a record or an image but does not end the run."""


def warn(message: str) -> None:
    """Warn with :class:`RecorderWarning`, even if warnings are turned into errors.

    Note:
        Under ``python -W error``, warnings raise exceptions, which would end the training run if raised from a hook.
        The message is then logged as an error of the logger ``lightning_recorder`` instead.
    """
    try:
        warnings.warn(message, RecorderWarning, stacklevel=2)
    except Exception:  # noqa: BLE001 - raised by the warning, or by an application's own way to show warnings
        _log.error(message)


def check_bool(name: str, value: object) -> None:
    """Raise ArgumentError if an argument is not a bool, for example the string ``"no"``, which is truthy."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} must be True or False, got {value!r}")


def check_integer(name: str, value: object, least: int) -> None:
    """Raise ArgumentError if an argument is not an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        hint = f": write {value:.0f}" if isinstance(value, float) and value.is_integer() and value >= least else ""
        raise ArgumentError(f"{name} must be an integer of at least {least}, got {value!r}{hint}")


def checked_depth(name: str, depth: object) -> int | None:
    """Return a depth as an integer, or None for no limit, which may also be passed as ``float("inf")``.

    Raises:
        ArgumentError: If the depth is neither an integer of at least 0 nor infinite. The message calls it ``name``.
    """
    if depth is None or depth == math.inf:
        return None
    check_integer(name, depth, 0)
    return int(depth)  # type: ignore[call-overload, no-any-return]  # checked above


def check_number(name: str, value: object, least: float) -> None:
    """Raise ArgumentError if an argument is not a number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= least:
        raise ArgumentError(f"{name} must be a number of at least {least:g}, got {value!r}")


def check_callable(name: str, value: object, arguments: str, purpose: str = "") -> None:
    """Raise if an argument is not a function, or cannot be called with the given positional arguments.

    ``arguments`` lists the names of the positional arguments, such as ``"site, tensor"``, or is empty. ``purpose`` is
    appended to the message.

    Raises:
        ArgumentError: The message names the argument, the call, and the line that defines the function.
    """
    wanted = f"{name} takes a function ({arguments}){purpose}"
    if not callable(value):
        raise ArgumentError(f"{wanted}, got {value!r}")
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # some builtins have no signature
        return
    try:
        signature.bind(*filter(None, arguments.split(", ")))
    except TypeError:
        bare = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
        shown = signature.replace(parameters=bare, return_annotation=signature.empty)
        raise ArgumentError(f"{wanted}; {_described(value)} takes {shown}") from None


def check_some(
    name: str, value: object, known: Sequence[str], synonyms: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Return a tuple of known words. A single word may be passed without a list.

    ``synonyms`` maps other common words to the known words with the same meaning.

    Raises:
        ArgumentError: If a word is unknown. The message names the argument, the allowed words and the closest word.
    """
    chosen = (value,) if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
    wrong = [each for each in chosen if each not in known]
    if wrong or not chosen:
        got = ", ".join(map(repr, chosen)) or "none"
        hint = did_you_mean(wrong[0], known, synonyms) if wrong else ""
        raise ArgumentError(f"{name} must be one or more of {', '.join(map(repr, known))}; got {got}{hint}")
    return tuple(str(each) for each in chosen)


def did_you_mean(word: object, known: Iterable[str], synonyms: Mapping[str, str] | None = None) -> str:
    """Return the suffix of a message about a wrong word: a suggestion of the closest known word, or an empty string.

    Example:
        >>> did_you_mean("checkpoint", ["checkpoints", "steps"])
        ": did you mean 'checkpoints'?"
        >>> did_you_mean("val", ["train", "validate"], {"val": "validate"})
        ": did you mean 'validate'?"
        >>> did_you_mean(3, ["train", "validate"])
        ''
    """
    found = closest(word, known, synonyms)
    return f": did you mean {found!r}?" if found else ""


def closest(
    word: object, known: Iterable[str], synonyms: Mapping[str, str] | None = None, *, similarity: float = 0.6
) -> str:
    """Return the known word that a wrong word probably means; empty if no known word is close.

    Args:
        word: The wrong word.
        known: The known words.
        synonyms: Other common words, mapped to the known words with the same meaning.
        similarity: The minimum ``difflib`` ratio at which a known word counts as close, ignoring case.
    """
    if not isinstance(word, str):
        return ""
    by_lower = {each.lower(): each for each in known}
    meant = (synonyms or {}).get(word.lower())
    if meant is not None and meant.lower() in by_lower:
        return meant
    near = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=similarity)
    return by_lower[near[0]] if near else ""


def imported(name: str, value: object) -> object:
    """Return the object at an import path, such as ``"package.module.function"``, or any other value unchanged.

    Raises:
        ArgumentError: If the path cannot be imported. The message names the argument.
    """
    if not isinstance(value, str):
        return value
    try:
        return pkgutil.resolve_name(value)
    except Exception as error:
        raise ArgumentError(f"{name}={value!r} cannot be imported: {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """Return the class and the message of an error, without secrets. Return only the class if ``__str__`` raises."""
    if isinstance(error, ModuleNotFoundError) and error.name == "PIL":  # the package has another name
        return "the package pillow is missing, `pip install pillow` installs it"
    try:
        return str(hide_secrets(f"{type(error).__name__}: {error}"))
    except Exception:  # noqa: BLE001 - an error's own __str__ may raise anything
        return type(error).__name__


def describe_call(function: Callable[..., object], error: BaseException) -> str:
    """Return the end of a sentence about an error that a user's function raised, with the line in the user's code.

    Example:
        >>> def is_due(step):
        ...     return step / 0
        >>> try:
        ...     is_due(1)
        ... except ZeroDivisionError as error:
        ...     describe_call(is_due, error)  # doctest: +ELLIPSIS
        'raised at ...:2: ZeroDivisionError: division by zero'
    """
    code = getattr(function, "__code__", None)
    lines = [line for frame, line in _frames(error.__traceback__) if frame.f_code is code]
    place = f" at {code.co_filename}:{lines[-1]}:" if code is not None and lines else ""
    return f"raised{place} {describe_error(error)}"


def _frames(traceback: TracebackType | None) -> list[tuple[FrameType, int]]:
    """Return the frames of a traceback with their line numbers, innermost last."""
    found = []
    while traceback is not None:
        found.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return found


def _described(function: object) -> str:
    """Return the name of a function and the line that defines it."""
    name = getattr(function, "__name__", None)
    code = getattr(function, "__code__", None)
    called = "the lambda" if name == "<lambda>" else repr(name or function)
    return called if code is None else f"{called} at {code.co_filename}:{code.co_firstlineno}"


def describe_missing(path: str | Path) -> str:
    """Return the end of a message about a missing path: its first missing folder or file, and a close match.

    Example:
        >>> describe_missing("/lightning_logs/version_0")
        "there is no 'lightning_logs' in '/'"
    """
    path = Path(path)
    gone, parent = path, path.parent
    while not parent.exists() and parent != parent.parent:
        gone, parent = parent, parent.parent
    try:
        near = closest(gone.name, (each.name for each in parent.iterdir()))
    except OSError:
        near = ""
    here = "the current folder" if parent == Path() else repr(str(parent))
    return f"there is no {gone.name!r} in {here}" + (f": did you mean {str(parent / near)!r}?" if near else "")
