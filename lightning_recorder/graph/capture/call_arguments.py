"""The non-tensor arguments of calls, such as a stride or a dimension."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import get_testing_overrides

from lightning_recorder.graph.capture.function_calls import PLAIN
from lightning_recorder.graph.capture.overloads import TENSOR, Omitted, as_declared, is_equal, named_arguments
from lightning_recorder.internals.preserve_state import read_extra_repr
from lightning_recorder.privacy import hide_secrets

__all__ = ["Given", "describe_arguments", "describe_module", "in_order", "plain_arguments", "prepare"]

_LONGEST = 200  # maximum number of characters of one value
_MOST_ENTRIES = 16  # maximum number of entries of a tuple
_WITHOUT_EFFECT = ("inplace",)  # arguments that do not change the computed values
_TYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}  # torch's conversions
_RENAMED = {"split_size_or_sections": "split_size"}  # from the name in the function to the name in the method
_BY_INDEX = ("__getitem__", "__setitem__")
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Given(NamedTuple):
    """A function with its arguments. Each tensor is replaced by a placeholder."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def plain_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Given | None:
    """Return the arguments of a call with placeholders for tensors; ``None`` if all arguments are tensors or None."""
    plain = tuple([each if type(each) in PLAIN else _without_tensors(each) for each in args])
    named = {name: _without_tensors(each) for name, each in kwargs.items()} if kwargs else {}
    if all(each is TENSOR or each is None for each in (*plain, *named.values())):
        return None
    return Given(function, plain, named)


def _without_tensors(value: Any) -> Any:
    kind: type = type(value)
    if kind in PLAIN:
        return value
    if issubclass(kind, Tensor):
        return TENSOR
    if issubclass(kind, (list, tuple)):
        # A list of sizes may have thousands of entries.
        parts = tuple([_without_tensors(each) for each in value[:_MOST_ENTRIES]])
        return (*parts, Omitted("…")) if len(value) > _MOST_ENTRIES else _all_or_tensor(parts)
    if kind is type:
        return _TYPES.get(value, Omitted(value.__name__))
    if issubclass(kind, np.generic):
        return value.item()
    return Omitted(kind.__name__)


def _all_or_tensor(values: tuple[Any, ...]) -> Any:
    """Return the values, or a single placeholder if all values are tensors."""
    return TENSOR if values and all(each is TENSOR for each in values) else values


def describe_arguments(given: Given) -> tuple[tuple[str, str], ...]:
    """Return the names and values of arguments as text, without tensors and without arguments that are ``None``.

    Arguments that equal their default are left out.
    """
    function, args, kwargs = given
    named = named_arguments(function, args, kwargs)
    if named is None:
        named = _by_signature(function, args, kwargs)
    if "index" in named and getattr(function, "__name__", "") in _BY_INDEX:
        named["index"] = Omitted(_index(named["index"]))
    return tuple(
        (name, _shown(value, name))
        for name, value in named.items()
        if value is not None and value is not TENSOR and name not in _WITHOUT_EFFECT
    )


def _by_signature(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a Python function's call by name, or by position if the name is unknown."""
    names, rest, defaults = _signature(function)
    named = dict(zip(names, args, strict=False))
    more = args[len(names) :]
    if more and rest:
        named[rest] = _all_or_tensor(more)
    else:  # an argument of unknown name is keyed by its position, so that different values are different settings
        named |= {str(place): each for place, each in enumerate(more, len(names))}
    named |= kwargs
    return {
        _RENAMED.get(name, name): as_declared(function, name, value)
        for name, value in named.items()
        if not (name in defaults and is_equal(value, defaults[name]))
    }


def _shown(value: Any, name: str = "") -> str:
    text = str(value) if type(value).__module__ == "torch" else repr(value)
    if "'" in text or '"' in text:
        text = str(hide_secrets(text, name))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _index(value: Any) -> str:
    """Return an index as it is written in the code, without the brackets."""
    parts = value if isinstance(value, tuple) else (value,)
    return ", ".join(
        _slice(each) if isinstance(each, slice) else "..." if each is ... else _shown(each) for each in parts
    )


def _slice(value: slice) -> str:
    start, stop, step = (
        "" if each is None else _shown(_without_tensors(each)) for each in (value.start, value.stop, value.step)
    )
    return f"{start}:{stop}" + (f":{step}" if step else "")


def prepare() -> None:
    """Make torch build and cache the list of its functions' parameters.

    While torch builds the list, it changes the warning filters. This makes Python forget which warnings it has shown.
    Call this function before the training, so that no warning of the training is shown twice.
    """
    get_testing_overrides()


def in_order(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the values of keyword arguments in the order of the function's parameters."""
    tensors = sum(isinstance(each, Tensor) for each in kwargs.values())
    names = _signature(function)[0] if tensors > 1 else ()
    yield from (kwargs[name] for name in names if name in kwargs)
    yield from (each for name, each in kwargs.items() if name not in names)


@lru_cache(4096)
def _signature(function: Callable[..., Any]) -> tuple[tuple[str, ...], str, dict[str, Any]]:
    """Return a function's positional parameters, the name of its ``*args`` parameter ("" if none), and its defaults."""
    if getattr(function, "__name__", "") in _BY_INDEX:
        return ("self", "index", "value"), "", {}
    # For functions without a signature, or whose signature accepts anything, use torch's own list of parameters.
    for described in (function, get_testing_overrides().get(function)):
        try:
            parameters = inspect.signature(described).parameters.values()  # type: ignore[arg-type]  # None raises
        except (TypeError, ValueError):
            continue
        names = tuple(each.name for each in parameters if each.kind in _BY_PLACE)
        if names:
            rest = next((each.name for each in parameters if each.kind is each.VAR_POSITIONAL), "")
            return names, rest, {each.name: each.default for each in parameters if type(each.default) in PLAIN}
    return (), "", {}


def describe_module(module: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return names and values of the settings in a module's ``extra_repr``. The name of a positional setting is ""."""
    return _parsed(read_extra_repr(module))


@lru_cache(4096)
def _parsed(text: str) -> tuple[tuple[str, str], ...]:
    """Return the names and values in the text of ``extra_repr``."""
    # Remove addresses of objects: they differ in each run.
    text = re.sub(r" at 0x[0-9A-Fa-f]+", "", text)
    pairs = [re.fullmatch(r"(?:([A-Za-z_]\w*)=)?(.*)", part.strip(), re.DOTALL) for part in _split(text)]
    found = [(each[1] or "", each[2]) for each in pairs if each is not None and each[2]]
    return tuple(
        (name, str(hide_secrets(value, name))[:_LONGEST]) for name, value in found if name not in _WITHOUT_EFFECT
    )


def _split(text: str) -> Iterator[str]:
    """Split a text at the commas and line breaks that are not inside brackets."""
    depth, start = 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([{<") - (letter in ")]}>")
        if letter in ",\n" and not depth:
            yield text[start:place]
            start = place + 1
    yield text[start:]
