"""The tensors inside a nested value, each addressed by its path."""

from __future__ import annotations

import re
from collections import Counter, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache, partial
from itertools import islice
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lightning_recorder.errors import ArgumentError

__all__ = ["describe_unknown", "iter_tensors", "register_container"]

# What is deeper or has more parts is no output but some object with the whole world in it; a list of a thousand linked
# cells must not end in a RecursionError, nor one of shared halves of halves in no end at all.
_MAX_DEPTH = 32
_MAX_PARTS = 100_000

# How many attributes of an unknown object, and entries of each, are asked whether they are tensors.
_MAX_LOOKS = 100

_Parts = Callable[[Any], Iterable[tuple[str, Any]]]
_Unknown = Callable[[str, Any, Exception | None], object]


def iter_tensors(value: Any, path: str = "out", *, unknown: _Unknown | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield the path and the tensor of every tensor in a nested value.

    Looks into tuples, named tuples, lists, deques, mappings, dataclasses (so into the ``ModelOutput`` of transformers),
    classes of attrs, the ``data`` of a ``PackedSequence``, the caches of transformers and what
    :func:`register_container` was told of. ``None``, numbers, strings and objects of other types are passed over. A
    path depends on the structure alone, so it is the same on every step.

    Args:
        value: What a module took or gave.
        path: The path of the value itself; the ones of its parts grow from it.
        unknown: Called with the path, the object and ``None`` for each object that is passed over although it holds
            tensors: an attribute that is one, or a list, tuple or dictionary of them. No code of the object runs to
            find out, and functions, classes and modules are not meant. Called with the path, the object and the error
            for each container that raises when it is taken apart, which is then passed over.

    Raises:
        Exception: What a container raises when it is taken apart, if there is no ``unknown`` to be told of it.

    Example:
        >>> import torch
        >>> output = {"logits": torch.ones(2), "hidden": [torch.ones(1), None, torch.ones(3)]}
        >>> [path for path, _ in iter_tensors(output)]
        ['out.logits', 'out.hidden[0]', 'out.hidden[2]']
        >>> normal = torch.distributions.Normal(torch.zeros(2), torch.ones(2))
        >>> list(iter_tensors([normal], unknown=lambda path, value, error: print("no tensors of", path, value)))
        no tensors of out[0] Normal(loc: torch.Size([2]), scale: torch.Size([2]))
        []
    """
    return _Walk(unknown).through(value, path, ())


def register_container(kind: type | str, parts: _Parts) -> None:
    """Say how the values of a class are taken apart, so that the tensors in them are found.

    What is registered holds for derived classes too, the nearest base first, and comes before what is known of the
    class otherwise. Registering a class again replaces what was said of it.

    Args:
        kind: The class; or its name, with or without its module, when importing it is to be avoided.
        parts: Takes a value and gives pairs of a suffix and a part. The suffix is what leads from the value to the
            part, as ``".keys"`` or ``"[0]"``, each another and the same on every step. A part is a tensor or anything
            that may hold some. If the function raises, no part of the value is found; see :func:`iter_tensors`.

    Raises:
        ArgumentError: If ``kind`` is neither a class nor a name, or a class of tensors, or ``parts`` is no function.

    Example:
        >>> import torch
        >>> class Memory:
        ...     def __init__(self):
        ...         self.read, self.written = torch.ones(2), [torch.ones(1)]
        >>> register_container(Memory, lambda memory: [(".read", memory.read), (".written", memory.written)])
        >>> [path for path, _ in iter_tensors((Memory(), None))]
        ['out[0].read', 'out[0].written[0]']
    """
    is_class = isinstance(kind, type) and not issubclass(kind, Tensor)
    if not is_class and not (isinstance(kind, str) and kind):
        raise ArgumentError(f"kind must be a class that is no tensor, or the name of one, got {kind!r}")
    if not callable(parts):
        raise ArgumentError(f"parts must be a function from a value to pairs (suffix, part), got {parts!r}")
    _REGISTERED[kind] = lambda value: map(_with_suffix, parts(value))
    _parts_of.cache_clear()


def _with_suffix(pair: tuple[str, Any]) -> tuple[str, Any]:
    suffix, part = pair
    if suffix[:1] not in (".", "["):
        raise ArgumentError(f"a suffix is to lead from the value to its part, as '.keys' or '[0]'; got {suffix!r}")
    return suffix, part


def describe_unknown(name: str, path: str, value: object, error: Exception | None) -> str:
    """What to say of an object that ``iter_tensors`` has passed over.

    Args:
        name: The name of the module that took or gave it.
        path: As for ``unknown`` of :func:`iter_tensors`, as the next two.
        value: The object.
        error: Why it could not be taken apart, or ``None`` if nothing is known of its class.
    """
    where = f"the tensors inside the {type(value).__name__} at {path!r} of module {name!r}"
    if error is None:
        return f"{where}; register_container can name them."
    return f"{where}, which could not be taken apart: {type(error).__name__}: {error}"


class _Walk:
    """One walk through a value, with the number of parts that it may still enter."""

    def __init__(self, unknown: _Unknown | None) -> None:
        self._unknown = unknown
        self._left = _MAX_PARTS

    def through(self, value: Any, path: str, around: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
        """The tensors in a value that lies inside the containers with these ids."""
        # Not isinstance, which asks the value itself for its class when the type says no.
        if issubclass(type(value), Tensor):
            yield path, value
            return
        # A cell that knows its neighbour, which knows the cell, is entered once on each path.
        if value is None or len(around) == _MAX_DEPTH or id(value) in around:
            return
        for part_path, part in self._parts(value, path):
            self._left -= 1
            if self._left < 0:
                return
            yield from self.through(part, part_path, (*around, id(value)))

    def _parts(self, value: Any, path: str) -> list[tuple[str, Any]]:
        """The parts of a container with their paths; nothing for anything else."""
        kind: type = type(value)  # declared, as mypy takes the inferred type[Any] for unhashable
        try:
            parts = _parts_of(kind)
            if parts is not None:
                # All at once, so that what raises half-way has no parts instead of other ones on other steps.
                return [(path + suffix, part) for suffix, part in islice(parts(value), self._left + 1)]
            if self._unknown is not None and _holds_tensors(value):
                self._unknown(path, value, None)
        except Exception as error:
            if self._unknown is None:
                raise
            self._unknown(path, value, error)
        return []


# How the parts of a container are found.


@lru_cache(maxsize=1024)
def _parts_of(kind: type) -> _Parts | None:
    """How the values of a class are taken apart; None where they are no containers."""
    for known in (_REGISTERED, _BUILT_IN):
        for base in kind.__mro__:
            for key in (base, f"{base.__module__}.{base.__qualname__}", base.__name__):
                if key in known:
                    return known[key]
    if issubclass(kind, Mapping):
        return _items
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return _attributes(*kind._fields)
    if issubclass(kind, (list, tuple, deque, UserList)):
        return _entries
    if is_dataclass(kind):
        return _attributes(*(each.name for each in fields(kind)))
    if hasattr(kind, "__attrs_attrs__"):
        return _attributes(*(each.name for each in kind.__attrs_attrs__))
    return None


def _attributes(*names: str) -> _Parts:
    return lambda value: [(f".{name}", getattr(value, name, None)) for name in names]


def _entries(value: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"[{index}]", part) for index, part in enumerate(value))


def _items(value: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    seen: Counter[str] = Counter()
    for key, part in value.items():
        suffix = _key(key)
        seen[suffix] += 1
        # Keys that are not equal can look alike.
        yield suffix if seen[suffix] == 1 else f"{suffix}#{seen[suffix]}", part


def _key(key: object) -> str:
    if isinstance(key, str):
        text = str.__str__(key)  # how an enum that is a string is formatted depends on the version of Python
        return f".{text}" if text.isidentifier() else f"[{text!r}]"
    text = f"{type(key).__name__}.{key.name}" if isinstance(key, Enum) else repr(key)
    # The address of an object is another one in each run.
    return f"[{re.sub(' at 0x[0-9A-Fa-f]+', '', text)}]"


def _cache(value: Any) -> list[tuple[str, Any]]:
    # In transformers 5 a cache has a list of layers, in early releases of 4 one of keys and one of values. In between
    # these two were properties beside the layers, so the layers are asked for first.
    names = ["layers"] if hasattr(value, "layers") else ["key_cache", "value_cache"]
    return [(f".{name}", getattr(value, name)) for name in names]


# What a layer of a cache holds is None before its first call; the last two are of linear attention.
_CACHE_LAYER = _attributes("keys", "values", "indexer_keys", "conv_states", "recurrent_states")

_REGISTERED: dict[type | str, _Parts] = {}
_BUILT_IN: dict[type | str, _Parts] = {
    # The other three fields are lengths and permutations, which are no activations.
    PackedSequence: _attributes("data"),
    # By name, since not everybody has transformers. Models that bring their own code have copies of the first three;
    # other people's classes are called Cache, too.
    "DynamicCache": _cache,
    "StaticCache": _cache,
    "EncoderDecoderCache": _attributes("self_attention_cache", "cross_attention_cache"),
    "transformers.cache_utils.Cache": _cache,
    "CacheLayerMixin": _CACHE_LAYER,
    "LinearAttentionCacheLayerMixin": _CACHE_LAYER,
}


# Which of the objects that are passed over hold tensors.

# These may refer to tensors and hold none for others to use, or are a model's own.
_NO_CONTAINERS = (nn.Module, type, FunctionType, MethodType, partial)

_CONTENTS: dict[type, Callable[[Any], Iterable[Any]]] = {
    dict: dict.values,
    list: list.__iter__,
    tuple: tuple.__iter__,
}


def _holds_tensors(value: object) -> bool:
    """Whether an attribute is a tensor, or a list, tuple or dictionary that holds one."""
    if issubclass(type(value), _NO_CONTAINERS):
        return False
    for attribute in islice(_held(value), _MAX_LOOKS):
        contents = next((read(attribute) for kind, read in _CONTENTS.items() if issubclass(type(attribute), kind)), ())
        if any(issubclass(type(each), Tensor) for each in (attribute, *islice(contents, _MAX_LOOKS))):
            return True
    return False


def _held(value: object) -> Iterator[object]:
    """What the attributes and slots of an object hold, read without running any code of its class."""
    kind: type = type(value)
    for each in _storage(kind):
        with suppress(AttributeError):  # a slot that was never set
            held = each.__get__(value)
            yield from held.values() if each.__name__ == "__dict__" else (held,)


@lru_cache(maxsize=1024)
def _storage(kind: type) -> tuple[GetSetDescriptorType | MemberDescriptorType, ...]:
    """The descriptors by which Python itself reaches the slots and the ``__dict__`` of an instance."""
    return tuple(
        each
        for base in kind.__mro__
        for name, each in vars(base).items()
        if type(each) is MemberDescriptorType or (name == "__dict__" and type(each) is GetSetDescriptorType)
    )
