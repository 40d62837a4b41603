"""Properties of a torch function: its name, its tensor arguments and in-place writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from lightning_recorder.internals.autograd import version_of
from lightning_recorder.structure import iter_tensors

__all__ = ["Versions", "function_name", "tensors_in", "versions", "writes"]

Versions = list[tuple[Tensor, int | None]]
"""The tensors that a function takes, with their version counters before the call."""

# Types that cannot hold tensors, checked first because every argument of every function is checked.
_PLAIN = (type(None), bool, int, float, str, complex)

# relu_ and relu are one operation: memory reuse does not change the computed values.
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
    """Return the common name of a function: ``add`` for ``Tensor.__add__``, ``T`` for the getter of ``Tensor.T``."""
    name: str = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":
        return str(getattr(func.__self__, "__name__", name))
    name = name.strip("_")
    return _SAME.get(name, name)


def writes(func: Any) -> bool:
    """Return True if the name of a function says that it writes into its first argument."""
    name = getattr(func, "__name__", "")
    return name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__") or (
        name.endswith("_") and not name.endswith("__")
    )


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among some values and nested inside them, in order."""
    found: list[Tensor] = []
    for each in values:
        if issubclass(type(each), Tensor):
            found.append(each)
        elif not isinstance(each, _PLAIN):
            found.extend(tensor for _, tensor in iter_tensors(each))
    return found


def versions(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Versions:
    """Return the tensors that a function takes, with their version counters."""
    return [(tensor, version_of(tensor)) for tensor in tensors_in((*args, *kwargs.values()))]
