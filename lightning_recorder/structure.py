"""The tensors inside a nested value, each addressed by its path."""

from __future__ import annotations

import random
import re
import sys
from collections import Counter, OrderedDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache, partial
from itertools import islice
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_recorder.errors import ArgumentError

__all__ = ["describe_unknown", "held_tensors", "ignore_unknown", "iter_tensors", "register_container"]

# Beyond these limits, an object is not a plausible output. The limits prevent a RecursionError for a long linked list,
# and an endless traversal of nested containers that share their entries.
_MAX_DEPTH = 32
_MAX_PARTS = 100_000

# The maximum number of attributes of an unknown object, and of entries of each attribute, to check for tensors.
_MAX_LOOKS = 100

# The maximum nesting depth of a tensor inside an unknown object.
_MAX_NESTED = 6
_PLAIN = frozenset((type(None), bool, int, float, str, bytes))

_Parts = Callable[[Any], Iterable[tuple[str, Any]]]
_Unknown = Callable[[str, Any, Exception | None], object]


def iter_tensors(
    value: Any, path: str = "out", *, unknown: _Unknown | None = None, deep: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield the path and the tensor of every tensor in a nested value.

    Supported containers are tuples, named tuples, lists, deques, mappings, dataclasses (including the ``ModelOutput``
    of transformers), attrs classes, the ``data`` of a ``PackedSequence``, the caches of transformers, the graphs and
    batches of PyTorch Geometric, and classes registered with :func:`register_container`. ``None``, numbers, strings and
    objects of other types are ignored. A path depends only on the structure, so it is the same at every step.

    Args:
        value: The input or output of a module.
        path: The path of the value itself, which is the prefix of all other paths.
        unknown: Called with the path, the object and ``None`` for each object that is ignored although it holds
            tensors, either as an attribute or in a list, tuple or dictionary in an attribute. The check runs no code of
            the object, and skips functions, classes and modules. Also called with the path, the object and the error
            for each container that raises while it is traversed. Such a container is ignored.
        deep: Also call ``unknown`` for objects that hold tensors inside nested objects; see :func:`held_tensors`.

    Raises:
        Exception: Any error of a container while it is traversed, if ``unknown`` is not given.

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
    kind: type = type(value)
    if kind in (list, tuple) and _parts_of(kind) is _entries and set(map(type, value)) == {Tensor}:  # most batches
        return iter([(f"{path}[{place}]", each) for place, each in enumerate(islice(value, _MAX_PARTS))])
    return _Walk(unknown, held_tensors if deep else _holds_tensors).through(value, path, ())


def register_container(kind: type | str, parts: _Parts) -> None:
    """Register a class as a container, so that the tensors in its instances are found.

    The registration also applies to subclasses, and takes precedence over built-in support. If several base classes are
    registered, the nearest base class is used. Registering a class again replaces the earlier registration.

    Args:
        kind: The class, or its name to avoid importing it, with or without its module.
        parts: A function that takes a value and returns pairs of a suffix and a part. The suffix is the path from the
            value to the part, such as ``".keys"`` or ``"[0]"``. It must be unique and the same at every step. A part is
            a tensor or a value that may contain tensors. If the function raises, no tensors of the value are found; see
            :func:`iter_tensors`.

    Raises:
        ArgumentError: If ``kind`` is neither a class nor a name, or is a tensor class, or ``parts`` is not a function.

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
        raise ArgumentError(f"kind must be a class other than Tensor, or its name, got {kind!r}")
    if not callable(parts):
        raise ArgumentError(f"parts must be a function from a value to pairs (suffix, part), got {parts!r}")
    _REGISTERED[kind] = lambda value: map(_with_suffix, _listed(parts, value))
    _parts_of.cache_clear()


def _with_suffix(pair: tuple[str, Any]) -> tuple[str, Any]:
    suffix, part = pair
    if suffix[:1] not in (".", "["):
        raise ArgumentError(f"a suffix must lead from the value to its part, such as '.keys' or '[0]'; got {suffix!r}")
    return suffix, part


def describe_unknown(name: str, path: str, value: object, error: Exception | None) -> str:
    """Describe an object that ``iter_tensors`` has ignored, for a message.

    Args:
        name: The name of the module whose input or output contains it.
        path: The path, as for ``unknown`` of :func:`iter_tensors`.
        value: The object.
        error: The error raised while it was traversed, or ``None`` if its class is unknown.
    """
    where = f"the tensors inside the {type(value).__name__} at {path!r} of module {name!r}"
    if error is None:
        return f"{where}; register_container can name them."
    return f"{where}, which could not be searched: {type(error).__name__}: {error}"


def ignore_unknown(path: str, value: object, error: Exception | None) -> None:
    """Ignore an object that cannot be traversed: an ``unknown`` for callers that do not need all tensors."""


class _Walk:
    """One traversal of a value, with the remaining number of parts to visit."""

    def __init__(self, unknown: _Unknown | None, holds_tensors: Callable[[object], object]) -> None:
        self._unknown = unknown
        self._holds_tensors = holds_tensors
        self._left = _MAX_PARTS

    def through(self, value: Any, path: str, around: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors in a value; ``around`` has the ids of the containers that enclose it."""
        # Use issubclass instead of isinstance, which would also read the value's own ``__class__``.
        if issubclass(type(value), Tensor):
            yield path, value
            return
        # Break cycles by not entering a container inside itself.
        if value is None or len(around) == _MAX_DEPTH or id(value) in around:
            return
        for part_path, part in self._parts(value, path):
            self._left -= 1
            if self._left < 0:
                return
            yield from self.through(part, part_path, (*around, id(value)))

    def _parts(self, value: Any, path: str) -> list[tuple[str, Any]]:
        """Return the parts of a container with their paths; empty for any other value."""
        kind: type = type(value)  # declared, as mypy considers the inferred type[Any] unhashable
        try:
            parts = _parts_of(kind)
            if parts is not None:
                # Collect eagerly, so that a container that raises half-way yields no parts instead of a varying number.
                return [(path + suffix, part) for suffix, part in islice(parts(value), self._left + 1)]
            if self._unknown is not None and self._holds_tensors(value):
                self._unknown(path, value, None)
        except Exception as error:
            if self._unknown is None:
                raise
            self._unknown(path, value, error)
        return []


# Decomposition of containers.


@lru_cache(maxsize=1024)
def _parts_of(kind: type) -> _Parts | None:
    """Return the function that decomposes instances of a class; None if the class is not a container."""
    for known in (_REGISTERED, _BUILT_IN):
        for base in kind.__mro__:
            for key in (base, f"{base.__module__}.{base.__qualname__}", base.__name__):
                if key in known:
                    return known[key]
    if issubclass(kind, Mapping):
        return _items
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return lambda value: (
            (f".{name}", part) for name, part in zip(kind._fields, tuple.__iter__(value), strict=False)
        )
    if issubclass(kind, (list, tuple, deque, UserList)):
        return _entries
    if is_dataclass(kind):
        return _attributes(*(each.name for each in fields(kind)))
    if hasattr(kind, "__attrs_attrs__"):
        return _attributes(*(each.name for each in kind.__attrs_attrs__))
    return None


def _attributes(*names: str) -> _Parts:
    return lambda value: [(f".{name}", _stored(value, name)) for name in names]


def _stored(value: Any, name: str) -> Any:
    """Return an attribute, or ``None`` if it is unset. Reading an attribute of the instance runs no user code."""
    kind: Any = type(value)
    if kind.__getattribute__ is object.__getattribute__:
        found = _class_attribute(kind, name)
        if type(found) is not MemberDescriptorType and not hasattr(type(found), "__set__"):  # also excludes properties
            stored = getattr(value, "__dict__", {})
            if name in stored:
                return stored[name]
        elif type(found) is MemberDescriptorType:
            with suppress(AttributeError):  # an unset slot
                return found.__get__(value)
        if found is None and not hasattr(kind, "__getattr__"):
            return None
    with _foreign_code():
        return getattr(value, name, None)


@lru_cache(maxsize=4096)
def _class_attribute(kind: type, name: str) -> Any:
    """Return an attribute of a class as it is stored, without binding it."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


class _NoWrites(TorchDispatchMode):
    """A dispatch mode that refuses writes to tensors created before it was entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotations there
        self._created: list[Tensor] = []

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and not {*map(_memory, args)} <= {*map(_memory, self._created), None}:
            raise ArgumentError(f"{func.__name__} writes into a tensor of the model while its container is read")
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not any(_memory(result) == _memory(each) for each in args):
            self._created.append(result)
        return result


def _memory(value: object) -> int | None:
    try:
        return value.untyped_storage().data_ptr() if isinstance(value, Tensor) else None
    except (NotImplementedError, RuntimeError):  # a sparse or a fake tensor
        return id(value)


@contextmanager
def _foreign_code() -> Iterator[None]:
    """Protect the training's random numbers and tensors from user code that runs only because of the recorder."""
    numpy: Any = sys.modules.get("numpy")
    python, legacy = random.getstate(), None if numpy is None else numpy.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices), _NoWrites():
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(legacy)


def _listed(parts: Callable[[Any], Iterable[Any]], value: Any) -> list[Any]:
    """Return the parts that user code yields, as a list. Random number generators and tensors do not change."""
    with _foreign_code():
        return list(islice(parts(value), _MAX_PARTS))


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    # Read subclasses of Python's containers without their own methods, which may draw random numbers.
    own = next((kind.__iter__ for kind in (list, tuple, deque) if issubclass(type(value), kind)), None)
    entries = _listed(iter, value) if own is None else own(value)
    return ((f"[{index}]", part) for index, part in enumerate(entries))


def _items(value: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    seen: Counter[str] = Counter()
    # OrderedDict comes first, because its order is separate from that of dict.
    own: Any = next((kind.items for kind in (OrderedDict, dict) if issubclass(type(value), kind)), None)
    for key, part in _listed(lambda each: each.items(), value) if own is None else own(value):
        suffix = _key(key)
        seen[suffix] += 1
        # Number keys that differ but have the same text.
        yield suffix if seen[suffix] == 1 else f"{suffix}#{seen[suffix]}", part


def _key(key: object) -> str:
    if isinstance(key, str):
        text = str.__str__(key)  # because the formatting of string enums depends on the Python version
        return f".{text}" if text.isidentifier() else f"[{text!r}]"
    if isinstance(key, Enum):
        text = f"{type(key).__name__}.{key.name}"
    elif type(key) in _PLAIN_KEYS:
        text = repr(key)
    else:
        with _foreign_code():
            text = repr(key)
    # Remove addresses of objects, which differ between runs.
    return f"[{re.sub(' at 0x[0-9A-Fa-f]+', '', text)}]"


_PLAIN_KEYS = (int, float, bool, bytes, type(None))


def _cache(value: Any) -> Iterable[tuple[str, Any]]:
    # In transformers 5, a cache has a list of layers. In early releases of 4, it has a list of keys and a list of
    # values. In releases between, it has layers, and both lists are properties, so check the layers first.
    has_layers = _stored(value, "layers") is not None
    return _attributes(*(["layers"] if has_layers else ["key_cache", "value_cache"]))(value)


def _graph(value: Any) -> Iterable[tuple[str, Any]]:
    return _items(dict(_listed(lambda graph: graph.to_dict().items(), value)))


# The fields of a cache layer, which are None before its first call. The last two belong to linear attention.
_CACHE_LAYER = _attributes("keys", "values", "indexer_keys", "conv_states", "recurrent_states")

_REGISTERED: dict[type | str, _Parts] = {}
_BUILT_IN: dict[type | str, _Parts] = {
    # The other three fields of a PackedSequence are lengths and permutations, not activations.
    PackedSequence: _attributes("data"),
    # Classes by name, since transformers may not be installed. The first three names have no module, since models with
    # custom code have copies of these classes. ``Cache`` has a module, since other libraries use the same name.
    "DynamicCache": _cache,
    "StaticCache": _cache,
    "EncoderDecoderCache": _attributes("self_attention_cache", "cross_attention_cache"),
    "transformers.cache_utils.Cache": _cache,
    "torch_geometric.data.data.BaseData": _graph,
    "CacheLayerMixin": _CACHE_LAYER,
    "LinearAttentionCacheLayerMixin": _CACHE_LAYER,
}


# Detection of ignored objects that hold tensors.

# Objects of these classes may refer to tensors without being containers, or belong to a model.
_NO_CONTAINERS = (nn.Module, type, FunctionType, MethodType, partial)

_CONTENTS: dict[type, Callable[[Any], Iterable[Any]]] = {
    dict: dict.values,
    list: list.__iter__,
    tuple: tuple.__iter__,
}


def _holds_tensors(value: object) -> bool:
    """Return True if an attribute is a tensor, or a list, tuple or dictionary that holds one."""
    if issubclass(type(value), _NO_CONTAINERS):
        return False
    for attribute in islice(_held(value), _MAX_LOOKS):
        contents = next((read(attribute) for kind, read in _CONTENTS.items() if issubclass(type(attribute), kind)), ())
        if any(issubclass(type(each), Tensor) for each in (attribute, *islice(contents, _MAX_LOOKS))):
            return True
    return False


def held_tensors(value: object) -> list[Tensor]:
    """Return the tensors that an object holds in attributes, lists, tuples and dictionaries, at any depth.

    No code of the object runs. Functions, classes and modules are skipped.
    """
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    todo = [(value, 0)]
    while todo and len(seen) < _MAX_LOOKS:
        each, depth = todo.pop()
        kind: type = type(each)
        if issubclass(kind, Tensor):
            found[id(each)] = each  # type: ignore[assignment]  # class checked without isinstance; see _Walk
        elif id(each) not in seen and depth < _MAX_NESTED and not issubclass(kind, _NO_CONTAINERS):
            seen.add(id(each))
            read = next((read for known, read in _CONTENTS.items() if issubclass(kind, known)), None)
            inside = [*islice(_held(each) if read is None else read(each), _MAX_LOOKS)]
            todo += [(part, depth + 1) for part in reversed(inside) if type(part) not in _PLAIN]
    return list(found.values())


def _held(value: object) -> Iterator[object]:
    """Yield the values of the attributes and slots of an object without running any code of its class."""
    kind: type = type(value)
    for each in _storage(kind):
        with suppress(AttributeError):  # an unset slot
            held = each.__get__(value)
            yield from held.values() if each.__name__ == "__dict__" else (held,)


@lru_cache(maxsize=1024)
def _storage(kind: type) -> tuple[GetSetDescriptorType | MemberDescriptorType, ...]:
    """Return Python's own descriptors of the slots and the ``__dict__`` of an instance."""
    return tuple(
        each
        for base in kind.__mro__
        for name, each in vars(base).items()
        if type(each) is MemberDescriptorType or (name == "__dict__" and type(each) is GetSetDescriptorType)
    )
