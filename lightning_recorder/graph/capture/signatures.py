"""The names of the arguments of torch's functions, from the schemas of their operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_recorder.internals.autograd import schemas_of

__all__ = ["bind"]

_ALIASES = {"input": "self", "axis": "dim", "keepdims": "keepdim"}  # names that Python accepts besides the schema's
_NUMBERED = (int, torch.dtype, torch.layout, torch.memory_format)  # schemas declare all of them as int
_ACCEPTED: dict[str, tuple[type, ...]] = {
    "Tensor": (Tensor, bool, int, float, complex),
    "List[Tensor]": (Tensor, tuple),
    "List[Optional[Tensor]]": (Tensor, tuple),
    "number": (bool, int, float, complex),
    "bool": (bool,),
    "int": _NUMBERED,
    "float": (int, float),
    "str": (str,),
    "Device": (torch.device, str, int),
    "List[int]": (tuple, torch.Size),
    "List[float]": (tuple,),
    "List[bool]": (tuple,),
}


class _Parameter(NamedTuple):
    name: str
    kinds: tuple[type, ...]
    positional: bool
    required: bool
    sizes: bool


def bind(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    kinds: list[type],
    named_kinds: Mapping[str, type],
) -> dict[str, Any] | None:
    """Return the arguments of a call by name; ``None`` if no overload of the function has such arguments.

    Args:
        function: A function that is implemented in C.
        args: The positional arguments.
        kwargs: The keyword arguments.
        kinds: The types of the positional arguments; ``object`` for one that is unknown.
        named_kinds: The types of the keyword arguments.
    """
    for parameters in _overloads(getattr(function, "__name__", "")):
        names = {each.name for each in parameters}
        renamed = {name: name if name in names else _ALIASES.get(name, name) for name in kwargs}
        keywords = {renamed[name]: kind for name, kind in named_kinds.items()}
        for values, types in _forms(parameters, args, kinds):
            if _fits(parameters, types, keywords):
                bound = {each.name: value for each, value in zip(parameters, values, strict=False)}
                return bound | {renamed[name]: value for name, value in kwargs.items()}
    return None


def _forms(
    parameters: tuple[_Parameter, ...], args: tuple[Any, ...], kinds: list[type]
) -> list[tuple[tuple[Any, ...], list[type]]]:
    """Return the arguments as they are given, and with the sizes of ``x.view(2, 3)`` in one tuple."""
    forms = [(args, kinds)]
    place = next((place for place, kind in enumerate(kinds) if kind is int), len(kinds))
    if place < min(len(parameters), len(kinds)) and parameters[place].sizes and set(kinds[place:]) == {int}:
        forms.append(((*args[:place], args[place:]), [*kinds[:place], tuple]))
    return forms


def _fits(parameters: tuple[_Parameter, ...], kinds: list[type], keywords: Mapping[str, type]) -> bool:
    positional = [each for each in parameters if each.positional]
    if len(kinds) > len(positional):
        return False
    given = {each.name: kind for each, kind in zip(positional, kinds, strict=False)}
    if given.keys() & keywords.keys():
        return False
    given |= keywords
    known = {each.name: each for each in parameters}
    return (
        given.keys() <= known.keys()
        and all(each.name in given for each in parameters if each.required)
        and all(kind is object or kind in known[name].kinds for name, kind in given.items())
    )


@lru_cache(4096)
def _overloads(name: str) -> tuple[tuple[_Parameter, ...], ...]:
    return tuple(tuple(_parameter(each) for each in schema.arguments) for schema in schemas_of(name))


def _parameter(argument: Any) -> _Parameter:
    text = str(argument.type).replace("SymInt", "int")
    optional = text.startswith("Optional[")
    text = text[len("Optional[") : -1] if optional else text
    kinds = _ACCEPTED.get(text, ())
    if optional:
        kinds += (type(None),)
    if text in ("List[int]", "List[float]") and argument.N is not None:  # ``int[1] dim`` also takes one number
        kinds += (int, float) if "float" in text else (int,)
    required = not argument.has_default_value() and not optional
    return _Parameter(argument.name, kinds, not argument.kwarg_only, required, text == "List[int]")
