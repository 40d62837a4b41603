"""The arguments of calls that are not tensors, such as a stride or a dimension."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.overrides import get_testing_overrides

from lightning_recorder.graph.capture.function_calls import PLAIN
from lightning_recorder.graph.capture.signatures import bind
from lightning_recorder.internals.preserve_state import read_extra_repr
from lightning_recorder.privacy import hide_secrets

__all__ = ["Given", "describe_arguments", "describe_module", "in_order", "plain_arguments", "prepare"]

_LONGEST = 200  # characters of one value
_MOST_ENTRIES = 16  # of a tuple
_WITHOUT_EFFECT = ("inplace",)  # on the computed values


class _Omitted:
    """Stands for a tensor, or for an object whose text may change from run to run."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


_TENSOR = _Omitted("tensor")


class Given(NamedTuple):
    """A function with its arguments, in which other values stand for tensors."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def plain_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Given | None:
    """Return the arguments of a call without its tensors; ``None`` if there are no others."""
    plain = tuple([each if type(each) in PLAIN else _without_tensors(each) for each in args])
    named = {name: _without_tensors(each) for name, each in kwargs.items()} if kwargs else {}
    if all(each is _TENSOR or each is None for each in (*plain, *named.values())):
        return None
    return Given(function, plain, named)


def _without_tensors(value: Any) -> Any:
    kind: type = type(value)
    if kind in PLAIN:
        return value
    if issubclass(kind, Tensor):
        return _TENSOR
    if issubclass(kind, (list, tuple)):
        # A list of sizes may have thousands of entries.
        parts = [_without_tensors(each) for each in value[:_MOST_ENTRIES]]
        if parts and all(each is _TENSOR for each in parts):
            return _TENSOR
        more = [_Omitted("…")] if len(value) > _MOST_ENTRIES else []
        return tuple(parts + more)
    return _Omitted(kind.__name__)


def describe_arguments(given: Given) -> tuple[tuple[str, str], ...]:
    """Return the names and values of arguments as text, without tensors and without arguments that are ``None``."""
    function, args, kwargs = given
    named = dict(_named(function, args, kwargs))
    if function in (Tensor.__getitem__, Tensor.__setitem__):
        named["index"] = _Omitted(_index(named["index"]))
    return tuple(
        (name, _shown(value, name))
        for name, value in named.items()
        if value is not None and value is not _TENSOR and name not in _WITHOUT_EFFECT
    )


def _named(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    if function is Tensor.__getitem__ or function is Tensor.__setitem__:
        return dict(zip(("self", "index", "value"), args, strict=False))
    if getattr(function, "__name__", "").startswith("__") and len(args) == 2:  # an operator, such as ``2 ** x``
        return {"self": args[0], "other": args[1], **kwargs}
    if not hasattr(function, "__code__"):
        known = [_kind(each) for each in args], {name: _kind(each) for name, each in kwargs.items()}
        if (found := bind(function, args, kwargs, *known)) is not None:
            return found
    names = _parameter_names(function)
    # An argument without a known name keeps its position, so that another value is another setting.
    rest = {str(position): args[position] for position in range(min(len(names), len(args)), len(args))}
    return {**dict(zip(names, args, strict=False)), **rest, **kwargs}


def _kind(value: Any) -> type:
    """Return the type of a recorded argument, in which a placeholder stands for a tensor."""
    if value is _TENSOR:
        return Tensor
    return object if isinstance(value, _Omitted) else type(value)


def _shown(value: Any, name: str = "") -> str:
    text = str(value) if type(value).__module__ == "torch" else repr(value)
    if "'" in text or '"' in text:
        text = str(hide_secrets(text, name))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _index(value: Any) -> str:
    """Return an index as it is written between brackets."""
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
    """Let torch list the parameters of its functions.

    It sets filters for warnings meanwhile, whereupon Python shows each warning again. Called before a training, this
    repeats none of the training.
    """
    get_testing_overrides()


def in_order(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield keyword arguments in the order of the parameters of a function, however the call orders them."""
    tensors = sum(isinstance(each, Tensor) for each in kwargs.values())
    names = _parameter_names(function) if tensors > 1 else ()
    yield from (kwargs[name] for name in names if name in kwargs)
    yield from (each for name, each in kwargs.items() if name not in names)


@lru_cache(4096)
def _parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a function's positional parameters; empty if they are unknown."""
    # torch lists the parameters of its functions that are implemented in C.
    described = get_testing_overrides().get(function, function)
    try:
        parameters = inspect.signature(described).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(each.name for each in parameters if each.kind is not each.VAR_KEYWORD)


def describe_module(module: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return the settings that a module shows in ``extra_repr``, such as its stride; the first ones have no name."""
    return _parsed(read_extra_repr(module))


@lru_cache(4096)
def _parsed(text: str) -> tuple[tuple[str, str], ...]:
    """Return the names and values in the text of ``extra_repr``."""
    # The address of an object differs in each run.
    text = re.sub(r" at 0x[0-9A-Fa-f]+", "", text)
    pairs = [re.fullmatch(r"(?:([A-Za-z_]\w*)=)?(.*)", part.strip(), re.DOTALL) for part in _split(text)]
    found = [(each[1] or "", each[2]) for each in pairs if each is not None and each[2]]
    return tuple(
        (name, str(hide_secrets(value, name))[:_LONGEST]) for name, value in found if name not in _WITHOUT_EFFECT
    )


def _split(text: str) -> Iterator[str]:
    """Yield the parts between the commas of a text that are not inside brackets."""
    depth, start = 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([{<") - (letter in ")]}>")
        if letter in ",\n" and not depth:
            yield text[start:place]
            start = place + 1
    yield text[start:]
