"""The states of the random number generators in the worker processes of a data loader."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

__all__ = ["Draws", "WatchedCollate", "draws_of"]

_CALLS = 3  # number of batches per worker to examine
_MOST_SOURCES = 16
_MOST_ENTRIES = 64  # maximum length of lists and dictionaries to search
_DEEPEST = 5
_MOST_SEARCHED = 2000  # maximum number of objects to search in a data set
_PLAIN = (str, bytes, int, float, bool, type(None), type, Tensor, np.ndarray)
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_FOREIGN = ("torch", "torchvision", "numpy", "random")  # packages whose functions are not searched


class Draws(NamedTuple):
    """A random number generator from which several workers draw the same numbers."""

    source: str  # the name of the generator, such as ``"numpy.random"`` or ``"dataset.rng"``
    workers: int  # the number of workers that draw the same numbers
    first: tuple[int, ...]  # digests of the states in the first worker, to compare with another epoch


class WatchedCollate:
    """A ``collate_fn`` that records the states of random number generators after the first batches of each worker.

    Samples and generators are unchanged.
    """

    def __init__(self, collate: Callable[[Any], Any], dataset: object, workers: int) -> None:
        self.collate = collate
        self.names = [name for name, _ in _sources(dataset)]
        # For each entry: a digest of the seed, a digest of the state, and 1 if the entry was recorded.
        self.table = torch.zeros(workers, _CALLS, len(self.names), 3, dtype=torch.int64, device="cpu").share_memory_()
        self._calls = 0

    def __call__(self, samples: Any) -> Any:
        """Collate samples to a batch."""
        found = self.collate(samples)
        info = get_worker_info()
        if info is not None and self._calls < _CALLS:
            try:
                self._note(info.id, info.dataset)
            except Exception:  # noqa: BLE001 - a data set may hold anything; on an error, this worker is not examined
                self._calls = _CALLS
        return found

    def _note(self, worker: int, dataset: object) -> None:
        sources = dict(_sources(dataset))
        for place, name in enumerate(self.names):
            if name in sources:
                self.table[worker, self._calls, place] = torch.tensor([*_digests(sources[name]), 1], device="cpu")
        self._calls += 1


def draws_of(watched: WatchedCollate) -> list[Draws]:
    """Return the generators that are used in each batch and have the same seed in all workers.

    With a single worker, return all generators that are used, for a comparison with another epoch.
    """
    table = watched.table.clone()
    used = table[table[:, -1, 0, 2] > 0] if watched.names else table[:0]
    found = []
    for place, name in enumerate(watched.names):
        seeds, states = used[:, :, place, 0], used[:, :, place, 1]
        moves = bool((states[:, 1:] != states[:, :-1]).all()) if len(used) else False
        if moves and bool((seeds == seeds[0]).all()):
            found.append(Draws(name, len(used), tuple(states[0].tolist())))
    return found


def _sources(dataset: object) -> list[tuple[str, Any]]:
    """Return the global generators, and the generators that a data set holds or that its methods use, by name."""
    found: list[tuple[str, Any]] = [("numpy.random", np.random), ("random", random), ("torch", torch)]
    return [*found, *_inside(dataset, "dataset", set(), 0)][:_MOST_SOURCES]


def _inside(value: Any, name: str, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _PLAIN) or id(value) in seen or depth > _DEEPEST or len(seen) >= _MOST_SEARCHED:
        return
    seen.add(id(value))
    if isinstance(value, _GENERATORS):
        yield name, value
    elif isinstance(value, (FunctionType, MethodType)):
        yield from _used(value, seen, depth)
    elif isinstance(value, partial):
        yield from _inside([value.func, *value.args, *value.keywords.values()], name, seen, depth + 1)
    elif isinstance(value, Mapping):
        for key, each in list(value.items())[:_MOST_ENTRIES] if type(value) is dict else ():
            shown = repr(key) if type(key) in (str, int) else type(key).__name__  # not the user's own repr
            yield from _inside(each, f"{name}[{shown}]", seen, depth + 1)
    elif isinstance(value, (list, tuple)):
        for place, each in enumerate(value[:_MOST_ENTRIES]):
            yield from _inside(each, f"{name}[{place}]", seen, depth + 1)
    else:
        for key, each in list(getattr(value, "__dict__", {}).items())[:_MOST_ENTRIES]:
            yield from _inside(each, f"{name}.{key}", seen, depth + 1)
        for kind in type(value).__mro__:
            for each in list(vars(kind).values())[:_MOST_ENTRIES]:
                function = getattr(each, "__func__", each) if isinstance(each, (staticmethod, classmethod)) else each
                if isinstance(function, FunctionType):
                    yield from _used(function, seen, depth + 1)


def _used(function: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the generators among the global variables that a function uses, also through functions that it calls."""
    code = getattr(function, "__code__", None)
    module = str(function.__module__)
    if code is None or id(code) in seen or depth > _DEEPEST or len(seen) >= _MOST_SEARCHED:
        return
    seen.add(id(code))
    if module.partition(".")[0] in _FOREIGN:
        return
    names = dict.fromkeys(_names_in(code))
    for name in names:
        each = function.__globals__.get(name)
        found = {f"{module}.{name}": each}
        if isinstance(each, ModuleType) and each.__name__.partition(".")[0] not in _FOREIGN:
            found = {f"{each.__name__}.{part}": vars(each).get(part) for part in names}
        for key, part in found.items():
            if isinstance(part, _GENERATORS) and id(part) not in seen:
                seen.add(id(part))
                yield key, part
            elif isinstance(part, FunctionType):
                yield from _used(part, seen, depth + 1)


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of global variables and attributes used in a function and in its nested functions."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names_in(each)


def _digests(source: Any) -> tuple[int, int]:
    """Return a digest of the seed of a generator, as far as the state reveals it, and a digest of the state."""
    if source is torch:
        state: Any = torch.get_rng_state().numpy().tobytes()
        # torch stores the seed itself.
        return torch.initial_seed() & 0x7FFFFFFF, zlib.crc32(state)
    if isinstance(source, torch.Generator):
        return source.initial_seed() & 0x7FFFFFFF, zlib.crc32(source.get_state().numpy().tobytes())
    if source is random or isinstance(source, random.Random):
        state = source.getstate()
        return _crc(state[1][:-1]), _crc(state)
    if isinstance(source, np.random.Generator):
        state = source.bit_generator.state
        inner = state["state"]
        # The increment of a PCG64 and the key of a Philox only depend on the seed.
        seed = inner.get("inc", inner.get("key")) if isinstance(inner, dict) else inner
        return _crc(seed), _crc(state)
    state = source.get_state()  # a NumPy generator
    return _crc(state[1].tobytes()), _crc((state[1].tobytes(), state[2]))


def _crc(value: object) -> int:
    return zlib.crc32(repr(value).encode())
