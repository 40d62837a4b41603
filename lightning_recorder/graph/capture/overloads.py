"""The names of the arguments of functions that torch implements in C, taken from torch's own schemas.

``inspect`` finds no signature of such a function, and the list in ``torch.overrides`` is incomplete. A function has
several overloads, such as ``sum(dtype)`` and ``sum(dim, keepdim, dtype)``. The types of the arguments determine which
one is called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple

import torch

from lightning_recorder.internals.autograd import schemas_of

__all__ = ["TENSOR", "Omitted", "as_declared", "is_equal", "named_arguments"]

# torch also accepts the argument names of NumPy.
_OTHER_NAMES = {"axis": "dim", "keepdims": "keepdim", "x": "self", "x1": "self", "x2": "other", "input": "self"}
_OPERATORS = {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "invert": "bitwise_not"}
_VARIANCES = ("std", "var", "std_mean", "var_mean")  # the default correction is 1 (unbiased)
_NUMBERS = ("int", "float", "complex", "bool")
_ACCEPTED = {
    "Tensor": ("tensor",),
    "int": ("int",),
    "SymInt": ("int",),
    "float": ("float", "int"),
    "number": _NUMBERS,
    "Scalar": _NUMBERS,
    "bool": ("bool",),
    "str": ("str",),
    "ScalarType": ("dtype",),
    "Layout": ("layout",),
    "MemoryFormat": ("memory_format",),
    "Device": ("device", "str", "int"),
    "Generator": ("object",),
}
_INTEGERS = ("List[int]", "List[SymInt]")
# torch accepts a tensor with one element as a number, and a number as a tensor. Overloads without conversions are
# preferred.
_CONVERTED = {"Tensor": _NUMBERS, **dict.fromkeys(("int", "SymInt", "float", "number", "Scalar", "bool"), ("tensor",))}
_NO = 1000


class Omitted:
    """A placeholder for a tensor, or for an object whose text may differ between runs."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


TENSOR = Omitted("tensor")


class _Parameter(NamedTuple):
    name: str
    kind: str
    optional: bool  # True if None is accepted
    length: int | None  # the length of the list, if a single number may be passed instead
    only_keyword: bool
    required: bool
    default: Any


def named_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the arguments of a call by name, without those that equal their default.

    The result does not depend on how the call is written: as a function, a method or an operator, with or without
    keywords.

    Returns:
        The arguments, or ``None`` if no schema of torch fits the call.
    """
    kinds = tuple(map(_kind, args))
    chosen = _overload(function, kinds, tuple((name, _kind(value)) for name, value in kwargs.items()))
    if chosen is None:
        return None
    if _is_spread(chosen, kinds):
        start = len(args) - len([kind for kind in kinds if kind == "int"])
        args = (*args[:start], tuple(args[start:]))
    given = dict(zip([each.name for each in chosen], args, strict=False))
    given |= {_known_name(name, chosen): value for name, value in kwargs.items()}
    found = {}
    for each in chosen:
        if each.name in given and not _is_default(each, value := _as_declared(each, given[each.name])):
            found["input" if each.name == "self" else each.name] = value
    correction = found.get("correction")
    if function.__name__ in _VARIANCES and type(correction) is int and correction in (0, 1):
        del found["correction"]
        found |= {} if correction else {"unbiased": False}
    return found


def _kind(value: Any) -> Any:
    """Return the type of an argument as text; for a tuple, the types of its entries."""
    if value is TENSOR:
        return "tensor"
    if isinstance(value, tuple):
        return tuple(map(_kind, value))
    return "object" if isinstance(value, Omitted) else type(value).__name__


@lru_cache(4096)
def _overload(
    function: Callable[..., Any], kinds: tuple[Any, ...], named: tuple[tuple[str, Any], ...]
) -> tuple[_Parameter, ...] | None:
    """Return the parameters of the overload that a call selects; ``None`` if no overload fits."""
    best, fewest = None, _NO
    for parameters in _overloads(function):
        conversions = _conversions(parameters, kinds, named)
        if conversions < fewest:
            best, fewest = parameters, conversions
    return best


def _conversions(parameters: tuple[_Parameter, ...], kinds: tuple[Any, ...], named: Iterable[tuple[str, Any]]) -> int:
    """Return the number of arguments that an overload converts; ``_NO`` or more if it does not accept the arguments."""
    if _is_spread(parameters, kinds):
        numbers = [kind for kind in kinds if kind == "int"]
        kinds = (*kinds[: len(kinds) - len(numbers)], tuple(numbers))
    places = [each for each in parameters if not each.only_keyword]
    given = {_known_name(name, parameters): kind for name, kind in named}
    given.pop("out", None)
    known = {each.name: each for each in parameters}
    pairs = [*zip(places, kinds, strict=False), *((known[name], kind) for name, kind in given.items() if name in known)]
    missing = {each.name for each in parameters if each.required} - {each.name for each, _ in pairs}
    twice = len(pairs) > len({each.name for each, _ in pairs})
    if len(kinds) > len(places) or not known.keys() >= given.keys() or missing or twice:
        return _NO
    return sum(_conversion(parameter, kind) for parameter, kind in pairs)


def _conversion(parameter: _Parameter, kind: Any) -> int:
    wanted = parameter.kind
    if kind == "NoneType":
        return 0 if parameter.optional else _NO
    if isinstance(kind, tuple) or wanted.startswith("List["):
        return _conversion_of_list(parameter, kind)
    # A parameter type that is not listed accepts everything.
    if wanted not in _ACCEPTED or kind in _ACCEPTED[wanted]:
        return 0
    return 1 if kind in _CONVERTED.get(wanted, ()) else _NO


def _conversion_of_list(parameter: _Parameter, kind: Any) -> int:
    wanted = parameter.kind
    if not wanted.startswith("List["):
        return _NO
    inner = wanted[5:-1].removeprefix("Optional[").removesuffix("]")
    if isinstance(kind, tuple):
        accepted = (*_ACCEPTED.get(inner, ()), *_CONVERTED.get(inner, ()), "object", "NoneType")
        return 0 if all(each in accepted for each in kind) else _NO
    if inner == "Tensor":
        return 0 if kind == "tensor" else _NO
    return 0 if parameter.length is not None and kind in _ACCEPTED.get(inner, ()) else _NO


def _is_spread(parameters: tuple[_Parameter, ...], kinds: tuple[Any, ...]) -> bool:
    """Return True if the sizes are separate arguments, as in ``x.view(2, 3)``."""
    places = [each for each in parameters if not each.only_keyword]
    return (
        bool(places)
        and places[-1].kind in _INTEGERS
        and [each.name for each in places[:-1]] in ([], ["self"])
        and len(kinds) >= len(places)
        and all(kind == "int" for kind in kinds[len(places) - 1 :])
        and (places[-1].length is None or len(kinds) > len(places))
    )


def _known_name(name: str, parameters: tuple[_Parameter, ...]) -> str:
    names = {each.name for each in parameters}
    return name if name in names else _OTHER_NAMES.get(name, name)


def as_declared(function: Callable[..., Any], name: str, value: Any) -> Any:
    """Return an argument of a Python function of torch in the form declared by torch's schema of the same name."""
    if not str(getattr(function, "__module__", "")).startswith("torch"):
        return value
    every = (each for parameters in _schemas(function.__name__) for each in parameters if each.name == name)
    parameter = next(every, None)
    return value if parameter is None else _as_declared(parameter, value)


def _as_declared(parameter: _Parameter, value: Any) -> Any:
    """Return the canonical form of an argument, since torch accepts several forms of the same value."""
    if isinstance(value, torch.Size):
        value = tuple(value)
    if parameter.kind == "float" and type(value) is int:
        return float(value)
    if parameter.kind == "Device" and isinstance(value, str):
        return torch.device(value)
    if parameter.kind not in _INTEGERS or parameter.length is None:
        return value
    if parameter.length == 1:
        return value[0] if isinstance(value, tuple) and len(value) == 1 else value
    return (value,) * parameter.length if type(value) is int else value


def _is_default(parameter: _Parameter, value: Any) -> bool:
    if parameter.required or isinstance(value, Omitted):
        return False
    if parameter.default is None or value is None:
        return value is parameter.default
    default = tuple(parameter.default) if isinstance(parameter.default, list) else parameter.default
    default = _as_declared(parameter, default)
    return is_equal(value, default)


def is_equal(one: Any, other: Any) -> bool:
    """Return True if two values are equal. A bool never equals a number."""
    return isinstance(one, bool) is isinstance(other, bool) and bool(one == other)


@lru_cache(4096)
def _overloads(function: Callable[..., Any]) -> tuple[tuple[_Parameter, ...], ...]:
    """Return the parameters of each overload of a function; empty for functions implemented in Python."""
    name = getattr(function, "__name__", "")
    if isinstance(inspect.unwrap(function), FunctionType) or name in ("__getitem__", "__setitem__", "__get__"):
        return ()
    bare = name.removeprefix("__").removesuffix("__")
    # ``__iadd__`` and ``__radd__`` take the arguments of ``add``.
    names = (name, bare, bare[1:]) if bare != name else (name,)
    return next(filter(None, (_schemas(_OPERATORS.get(each, each)) for each in names)), ())


@lru_cache(4096)
def _schemas(name: str) -> tuple[tuple[_Parameter, ...], ...]:
    return tuple(tuple(map(_parameter, schema)) for schema in schemas_of(name))


def _parameter(argument: Any) -> _Parameter:
    text = str(argument.real_type)
    optional = text.startswith("Optional[")
    kind = text[len("Optional[") : -1] if optional else text
    required = not argument.has_default_value()
    default = None if required else argument.default_value
    return _Parameter(argument.name, kind, optional, argument.N, argument.kwarg_only, required, default)
