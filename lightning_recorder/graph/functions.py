"""What a function of torch is called, what it takes, and whether it writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from lightning_recorder.autograd import version_of
from lightning_recorder.structure import iter_tensors

__all__ = ["Versions", "function_name", "tensors_in", "versions", "writes"]

Versions = list[tuple[Tensor, int | None]]
"""Tensors that a function takes, with the number of times that each was written to before."""

# What is no container; asked for each argument of each function.
_PLAIN = (type(None), bool, int, float, str, complex)

# relu_ and relu are one operation; whether it reuses memory is no part of what is computed.
_SAME = {
    "radd": "add",
    "rmul": "mul",
    "rsub": "sub",
    "rdiv": "div",
    "truediv": "div",
    "iadd": "add",
    "imul": "mul",
    "isub": "sub",
}


def function_name(func: Any) -> str:
    """The function's name as people say it: ``add`` for ``Tensor.__add__``, ``T`` for the getter of ``Tensor.T``."""
    name: str = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":
        return str(getattr(func.__self__, "__name__", name))
    name = name.strip("_")
    return _SAME.get(name, name)


def writes(func: Any) -> bool:
    """Whether a function is by its name one that writes into its first argument."""
    name = getattr(func, "__name__", "")
    return name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__") or (
        name.endswith("_") and not name.endswith("__")
    )


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among some values and inside them, in order."""
    found: list[Tensor] = []
    for each in values:
        if issubclass(type(each), Tensor):
            found.append(each)
        elif not isinstance(each, _PLAIN):
            found.extend(tensor for _, tensor in iter_tensors(each))
    return found


def versions(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Versions:
    """The tensors that a function takes, with the number of times that each was written to."""
    return [(tensor, version_of(tensor)) for tensor in tensors_in((*args, *kwargs.values()))]
