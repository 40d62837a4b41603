"""Checks of data from files, which may be damaged or written by another version."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lightning_recorder.errors import DumpError, describe_error

__all__ = ["check_fields", "is_finite", "is_whole", "read_json"]

_LONGEST = 1 << 28  # bytes
_Check = Callable[[Any], bool]


def read_json(path: Path) -> Any:
    """Return the contents of a JSON file.

    Raises:
        DumpError: If the file is damaged. The message names the file and the reason.
        FileNotFoundError: If there is no such file.
    """
    try:
        if path.stat().st_size <= _LONGEST:
            return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise DumpError(f"{path} cannot be read: {describe_error(error)}") from error
    raise DumpError(f"{path} is larger than any that this package writes")


def check_fields(made: Any) -> None:
    """Raise if the value of a dataclass field does not have the annotated type.

    Integers must fit into 64 bits and other numbers must be finite, so that later computations do not fail.

    Raises:
        TypeError: If a value has the wrong type. The message names the class and the field.
    """
    kind: Any = type(made)
    for name, check in _checks(kind):
        if not check(getattr(made, name)):
            raise TypeError(f"{name} of a {type(made).__name__.lower()} has a wrong value")


def is_whole(value: object) -> bool:
    """Return True for an integer of at most 64 bits."""
    return type(value) is int and -(2**63) <= value < 2**63


def is_finite(value: object) -> bool:
    """Return True for a number whose float value is finite."""
    return is_whole(value) or (type(value) is float and math.isfinite(value))


@cache
def _checks(kind: Any) -> list[tuple[str, _Check]]:
    hints = get_type_hints(kind)
    return [(each.name, _check_of(hints[each.name])) for each in fields(kind) if each.name != "modules"]


def _check_of(hint: Any) -> _Check:
    """Return a function that checks a value against an annotation."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is int:
        return is_whole
    if hint is float:
        return is_finite
    if origin is Literal:
        return lambda value: isinstance(value, str) and value in inner
    if origin in (Union, UnionType):
        checks = [_check_of(each) for each in inner]
        return lambda value: any(check(value) for check in checks)
    if origin is tuple:
        return _check_of_tuple(inner)
    if origin is Mapping:
        key, entry = map(_check_of, inner)
        return lambda value: isinstance(value, Mapping) and all(key(name) and entry(value[name]) for name in value)
    if is_dataclass(hint):
        kind: Any = hint
        return lambda value: (
            isinstance(value, kind) and all(check(getattr(value, name)) for name, check in _checks(kind))
        )
    return lambda value: type(value) is hint


def _check_of_tuple(inner: tuple[Any, ...]) -> _Check:
    checks = [_check_of(each) for each in inner if each is not ...]
    if ... in inner:
        check = checks[0]
        return lambda value: type(value) is tuple and all(map(check, value))
    return lambda value: (
        type(value) is tuple and len(value) == len(checks) and all(c(v) for c, v in zip(checks, value, strict=True))
    )
