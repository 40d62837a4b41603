"""The tensors inside a nested value, each addressed by its path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

__all__ = ["iter_tensors"]

# What is deeper or has more parts is no output but some object with the whole world in it; a list of a thousand linked
# cells must not end in a RecursionError, nor one of shared halves of halves in no end at all.
_MAX_DEPTH = 32
_MAX_PARTS = 100_000


def iter_tensors(value: Any, path: str = "out") -> Iterator[tuple[str, Tensor]]:
    """Yield the path and the tensor of every tensor in a nested value.

    Looks into tuples, named tuples, lists, mappings, dataclasses (so into the ``ModelOutput`` of transformers) and the
    ``data`` of a ``PackedSequence``. ``None``, numbers, strings and objects of other types are passed over. A path
    depends on the structure alone, so it is the same on every step.

    Args:
        value: What a module took or gave.
        path: The path of the value itself; the ones of its parts grow from it.

    Example:
        >>> import torch
        >>> output = {"logits": torch.ones(2), "hidden": [torch.ones(1), None, torch.ones(3)]}
        >>> [path for path, _ in iter_tensors(output)]
        ['out.logits', 'out.hidden[0]', 'out.hidden[2]']
    """
    return _walk(value, path, (), [_MAX_PARTS])


def _walk(value: Any, path: str, around: tuple[int, ...], left: list[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
        return
    # A cell that knows its neighbour, which knows the cell, is entered once on each path.
    if value is None or len(around) == _MAX_DEPTH or id(value) in around:
        return
    for suffix, part in _parts(value):
        left[0] -= 1
        if left[0] < 0:
            return
        yield from _walk(part, path + suffix, (*around, id(value)), left)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a container with what each adds to the path; nothing for anything else."""
    if isinstance(value, PackedSequence):
        # The other three fields are lengths and permutations, which are no activations.
        yield ".data", value.data
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield _key(key), part
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for field in value._fields:
            yield f".{field}", getattr(value, field)
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield f"[{index}]", part
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield f".{each.name}", getattr(value, each.name, None)


def _key(key: object) -> str:
    if isinstance(key, str):
        return f".{key}" if key.isidentifier() else f"[{key!r}]"
    return f"[{key!r}]" if isinstance(key, int) else f"[{str(key)!r}]"
