"""Facts about the parameters that no optimizer has: layers that are as they were made, and copies of trained parts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_recorder.internals.autograd import without_functions
from lightning_recorder.internals.module_tree import (
    class_name,
    is_training,
    named_modules_of,
    named_parameters_of,
    stored_attribute,
)
from lightning_recorder.internals.pause_recording import pause_recording
from lightning_recorder.module_names import own_parameters, without_wrappers
from lightning_recorder.names import RUNNING_STATISTICS
from lightning_recorder.reductions.bank import begin_copy
from lightning_recorder.reductions.values import PLAIN_TYPES

__all__ = ["HeldParameters", "is_as_made"]

_MOST_LAYERS = 32  # the maximum number of layers whose values are examined
_MOST_VALUES = 1024  # the maximum number of values of a tensor that are examined
_FEWEST_VALUES = 256  # a tensor with fewer values does not show how it was made
_MOST_COPIES, _MOST_TENSORS, _MOST_OF_COPY = 4, 4, 64  # the limits for copies: parts, tensors of each, values of each
_LONGEST = 100  # the maximum number of steps whose factors are kept
_RESIDUAL = 0.1  # a step is an average if this share of it at most is something else, such as rounding
_NAMES_OF_COPIES = ("target", "teacher", "ema", "momentum", "copy", "slow", "averag")

_Values = NDArray[np.float64]


class HeldParameters:
    """Observes the parameters that no optimizer has, at the beginning of recorded steps and of the batches after them.

    Args:
        root: The model.
        trained: The parameters of the optimizers.

    Note:
        The time is limited: at most 32 layers are examined, once, and at most 4 copies, with 256 values each. On a
        GPU, the first examination waits for the device. Later looks do not wait: their values are used once they have
        arrived.
    """

    def __init__(self, root: nn.Module, trained: Sequence[Tensor]) -> None:
        own = {id(each) for each in trained if each.requires_grad}
        with pause_recording(), without_functions():
            self._copies = _copies_of(root, own)
            inside = tuple(f"{each.name}." for each in self._copies)
            self.layers = {
                name: verdict for name, verdict in _layers_of(root, own).items() if not f"{name}.".startswith(inside)
            }
            """Each examined layer: True if it is as it was made, False if it has learned, None if it is not known."""
        self._begin: tuple[int, _Look] | None = None
        self._closed: list[tuple[tuple[int, _Look], tuple[int, _Look]]] = []

    @property
    def waits(self) -> bool:
        """True between :meth:`begin` and :meth:`look`."""
        return self._begin is not None

    def begin(self, step: int) -> None:
        """Look at the copies before a recorded batch of a step."""
        if self._copies and self._begin is None:
            self._begin = step, self._looked()

    def look(self, step: int) -> None:
        """Look at the copies before the batch after a recorded one."""
        if self._begin is not None:
            self._closed.append((self._begin, (step, self._looked())))
            self._begin = None

    def facts(self) -> dict[str, Any]:
        """Return ``as_made`` and ``learned``, the names of the layers, and ``copies``, with the facts about each."""
        while self._closed and all(each.has_arrived for _, each in self._closed[0]):
            looks = self._closed.pop(0)
            before, after = (each.split(self._copies) for _, each in looks)
            for copy, old, new in zip(self._copies, before, after, strict=True):
                copy.add(old, new, (looks[0][0], looks[1][0]))
        as_made, learned = ([name for name, each in self.layers.items() if each is it] for it in (True, False))
        copies = [each.facts() for each in self._copies if each.records]
        return {
            **({"as_made": as_made, "learned": learned} if as_made else {}),
            **({"copies": copies} if copies else {}),
        }

    def _looked(self) -> _Look:
        with pause_recording(), without_functions():
            return _Look.at([tensor for each in self._copies for tensor in (*each.own, *each.others)])


class _Look:
    """A few values of some tensors, on their way to the host."""

    def __init__(self, values: list[Tensor], events: list[Any]) -> None:
        self._values, self._events = values, events

    @classmethod
    def at(cls, tensors: Sequence[Tensor], most: int = _MOST_OF_COPY) -> _Look:
        by_device: dict[torch.device, list[int]] = defaultdict(list)
        for place, tensor in enumerate(tensors):
            by_device[tensor.device].append(place)
        values: dict[int, Tensor] = {}
        events: list[Any] = []
        for places in by_device.values():
            some = [_some(tensors[place], most).float() for place in places]
            joined = torch.cat(some)  # a copy, also of a single tensor, since the parameters change
            host, event = begin_copy(joined) if joined.is_cuda else (joined.to("cpu"), None)
            values |= zip(places, host.split([len(each) for each in some]), strict=True)
            events += [] if event is None else [event]
        return cls([values[place] for place in range(len(tensors))], events)

    @property
    def has_arrived(self) -> bool:
        return all(event.query() for event in self._events)

    def wait(self) -> list[_Values]:
        """Wait for the device and return the values of each tensor."""
        for event in self._events:
            event.synchronize()
        return [each.numpy().astype(np.float64) for each in self._values]

    def split(self, copies: Sequence[_Copy]) -> list[_Pair]:
        """Return the values of each copy and of its original."""
        values, found = iter(self.wait()), []
        for each in copies:
            both = [[next(values) for _ in each.own], [next(values) for _ in each.others]]
            count = each.parameters
            found.append(_Pair(*(_joined(part) for side in both for part in (side[:count], side[count:]))))
        return found


def _joined(parts: list[_Values]) -> _Values:
    return np.concatenate(parts) if parts else np.zeros(0)


class _Pair(NamedTuple):
    """Values of a copy and of its original: of parameters, and of running statistics."""

    copy: _Values
    copy_buffers: _Values
    source: _Values
    source_buffers: _Values


@dataclass
class _Copy:
    """A part that no optimizer has, and the trained part with the same parameters."""

    name: str
    of: str
    module: nn.Module
    own: list[Tensor]  # the parameters and the running statistics that are looked at
    others: list[Tensor]  # those of the original
    parameters: int  # the number of parameters among them
    is_as_made: bool
    records: int = 0
    equal: int = 0  # the number of records that begin with equal values
    followed: int = 0  # the number of steps, or of intervals between them, in which the copy has moved
    first: _Pair | None = None
    last: _Pair | None = None
    buffers_moved: list[bool] = field(default_factory=lambda: [False, False])  # those of the copy, of the original
    factors: list[float] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    moves: list[tuple[int, int]] = field(default_factory=list)  # the steps between which the copy has moved
    last_step: int = 0

    def add(self, before: _Pair, after: _Pair, steps: tuple[int, int]) -> None:
        """Add the values before two steps. A step that has not moved the original is ignored."""
        step = after.source - before.source
        if not step.any() or not all(np.isfinite(each).all() for each in (*before, *after)):
            return
        self.records += 1
        self.first, last = self.first or before, self.last or before
        self.last = after
        self.equal += bool((before.copy == before.source).all())
        pairs = ((last, before, self.last_step, steps[0]), (before, after, *steps))
        moves = [(since, until) for one, other, since, until in pairs if (one.copy != other.copy).any()]
        self.moves, self.last_step = [*self.moves, *moves][-_LONGEST:], steps[1]
        self.followed += bool(moves)
        for place, name in enumerate(("copy_buffers", "source_buffers")):
            self.buffers_moved[place] |= bool((getattr(self.first, name) != getattr(after, name)).any())
        moved = after.copy - before.copy
        if not moved.any():
            return
        # The average is computed after or before the step of the optimizer.
        found = [_factor(moved, each - before.copy) for each in (after.source, before.source)]
        (residual, factor), is_before = min((each, place == 1) for place, each in enumerate(found))
        if residual <= _RESIDUAL:
            lag = float(np.linalg.norm(before.copy - before.source) / np.linalg.norm(step)) - is_before
            self.factors, self.lags = [*self.factors, factor][-_LONGEST:], [*self.lags, lag][-_LONGEST:]

    def facts(self) -> dict[str, Any]:
        """Return the facts as JSON values."""
        first, last = self.first, self.last
        moved = 0.0
        if first is not None and last is not None:
            moved = float(np.linalg.norm(last.source - first.source) / (np.linalg.norm(first.source) or 1.0))
        return {
            "copy": self.name,
            "of": self.of,
            "records": self.records,
            "equal": self.equal,
            "begins_equal": first is not None and bool((first.copy == first.source).all()),
            "followed": self.followed,
            "moved": moved,
            "factors": len(self.factors),
            "factor": float(np.median(self.factors)) if self.factors else None,
            "lag": float(np.median(self.lags)) if self.lags else None,
            "buffers_followed": self.buffers_moved[0],
            "buffers_moved": self.buffers_moved[1],
            "evaluates": not any(is_training(each) for _, each in named_modules_of(self.module)),
            "is_as_made": self.is_as_made,
            # A copy that follows in most steps is an average, which does not jump.
            "moves": [] if 2 * self.followed > self.records else [list(each) for each in self.moves],
        }


def _factor(moved: _Values, way: _Values) -> tuple[float, float]:
    """Return the factor of an average that moves a copy along the way to its original, after the share of the rest."""
    length = float(way @ way)
    factor = float(moved @ way) / length if length else 0.0
    return float(np.linalg.norm(moved - factor * way) / np.linalg.norm(moved)), factor


def _is_readable(tensor: object) -> bool:
    """Return True for a tensor of floating-point numbers that stores its values in its own memory."""
    return (
        type(tensor) in PLAIN_TYPES
        and isinstance(tensor, Tensor)
        and tensor.layout is torch.strided
        and tensor.is_floating_point()
        and not tensor.is_meta
        and bool(tensor.numel())
    )


def _some(tensor: Tensor, most: int) -> Tensor:
    """Return up to this number of values of a tensor, evenly over its memory, without a copy of the tensor."""
    tensor = tensor.detach()
    if not tensor.is_contiguous():  # such as channels_last
        strides = tensor.stride()
        tensor = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    flat = tensor.reshape(-1)
    return flat[:: max(1, len(flat) // most)][:most]


# Copies.


def _copies_of(root: nn.Module, trained: set[int]) -> list[_Copy]:
    """Return the largest parts without a trained parameter whose parameters correspond to those of a trained part."""
    parts: dict[str, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, parameter in named_parameters_of(root):
        for place, letter in enumerate(name):
            if letter == ".":
                parts[name[:place]].append((name[place + 1 :], parameter))
    trained_parts: dict[Any, list[str]] = defaultdict(list)
    held: list[tuple[str, Any]] = []
    for part, parameters in parts.items():
        are_trained = {id(each) in trained for _, each in parameters}
        if len(are_trained) > 1 or not all(_is_readable(each) for _, each in parameters):
            continue
        key = tuple((name, tuple(each.shape)) for name, each in parameters)
        if are_trained == {True}:
            trained_parts[key].append(part)
        elif any(each.dim() > 1 for _, each in parameters):
            held.append((part, key))
    found: list[_Copy] = []
    modules = dict(named_modules_of(root)) if held else {}
    for part, key in sorted(held, key=lambda each: each[0].count(".")):
        is_inside = any(part.startswith(f"{each.name}.") for each in found)
        if not is_inside and len(found) < _MOST_COPIES and part in modules:
            copy = _copy(part, trained_parts.get(key, ()), parts, modules)
            found += [] if copy is None else [copy]
    for each in found:
        each.name, each.of = (next(iter(without_wrappers({name: root}))) for name in (each.name, each.of))
    return found


def _copy(
    part: str,
    originals: Sequence[str],
    parts: Mapping[str, Sequence[tuple[str, Tensor]]],
    modules: Mapping[str, nn.Module],
) -> _Copy | None:
    """Return a part as the copy of the first of some trained parts that has its values, or by its name."""
    own = [each for _, each in parts[part]]
    chosen = sorted({int(place) for place in np.linspace(0, len(own) - 1, _MOST_TENSORS)})
    originals = [each for each in originals if each in modules]
    found = ""
    for each in originals:
        pairs = [(own[place], parts[each][place][1]) for place in chosen]
        one, other = (_Look.at(side).wait() for side in zip(*pairs, strict=True))
        if all(np.array_equal(*both) for both in zip(one, other, strict=True)):
            found = each
            break
    if not found and originals and any(word in part.lower() for word in _NAMES_OF_COPIES):
        found = originals[0]
    if not found:
        return None
    sides = []
    for name in (part, found):
        buffers = [
            buffer
            for _, module in named_modules_of(modules[name])
            for path in RUNNING_STATISTICS
            if _is_readable(buffer := stored_attribute(module, path))
        ]
        sides.append(([parts[name][place][1] for place in chosen], buffers[: len(RUNNING_STATISTICS)]))
    if [len(each) for each in sides[0]] != [len(each) for each in sides[1]]:
        return None
    verdicts = _layers_of(modules[part], set()).values()
    is_new = True in verdicts and False not in verdicts
    (own_parts, buffers), (theirs, their_buffers) = sides
    return _Copy(part, found, modules[part], [*own_parts, *buffers], [*theirs, *their_buffers], len(own_parts), is_new)


# Layers that are as they were made.


def _layers_of(root: nn.Module, trained: set[int]) -> dict[str, bool | None]:
    """Return for some layers without a trained parameter whether they are as they were made; None if not known."""
    layers: dict[str, list[tuple[str, Tensor]]] = {}
    named = without_wrappers(dict(named_modules_of(root)))
    for name, module in named.items():
        own = list(own_parameters(module))
        if own and not any(id(each) in trained for _, each in own) and all(_is_readable(each) for _, each in own):
            layers[name] = [(path, each) for path, each in own]
    chosen = sorted({int(place) for place in np.linspace(0, len(layers) - 1, _MOST_LAYERS)}) if layers else []
    names = [name for place, name in enumerate(layers) if place in set(chosen)]
    for name in names:
        statistics = ((path, stored_attribute(named[name], path)) for path in RUNNING_STATISTICS)
        layers[name] += [(path, each) for path, each in statistics if type(each) in PLAIN_TYPES and each.numel()]
    values = iter(_Look.at([each for name in names for _, each in layers[name]], _MOST_VALUES).wait())
    found: dict[str, bool | None] = {}
    for name in names:
        tensors = {path: (each, next(values)) for path, each in layers[name]}
        found[name] = is_as_made(class_name(type(named[name])), tensors)
    return found


def is_as_made(kind: str, tensors: Mapping[str, tuple[Tensor, _Values]]) -> bool | None:
    """Return True if the values of a layer show that it was never trained, and False if they show that it was.

    A normalization begins with weights of one, biases of zero, running means of zero and running variances of one.
    Another layer begins with biases of zero and weights of one normal or uniform distribution, or with weights and
    biases that are uniform within the bound of torch's initializations.

    Args:
        kind: The name of the class of the layer.
        tensors: The parameters and running statistics, each with some of its values.

    Returns:
        None if the values show neither.
    """
    if "Norm" in kind:
        return _is_new_norm({path: values for path, (_, values) in tensors.items()})
    weights = {path: each for path, each in tensors.items() if each[0].dim() > 1}
    biases = {path: values for path, (each, values) in tensors.items() if each.dim() == 1}
    if not weights or any(len(values) < _FEWEST_VALUES for _, values in weights.values()):
        return None
    kurtosis = [_kurtosis(values) for _, values in weights.values()]
    bounds = [_bound(kind, tensor, values) for tensor, values in weights.values()]
    if None not in bounds:
        limit = max(each for each in bounds if each is not None)
        is_within = all((abs(each) <= limit).all() for each in biases.values())
        return is_within if biases else True
    if "Embedding" in kind or not biases or not all(map(math.isfinite, kurtosis)):
        return None
    if any(each.any() for each in biases.values()):
        # The biases may still have torch's initialization, and the weights another one.
        into = min(math.prod(tensor.shape[1:]) for tensor, _ in weights.values())
        return None if all(abs(each).max() <= into**-0.5 for each in biases.values()) else False
    return True if all(_LEAST < each < _LARGEST for each in kurtosis) else None


# The kurtosis is 1.8 for a uniform distribution, 2.4 for a normal one that is cut off at two standard deviations, and
# 3 for a normal one.
_LEAST, _LARGEST, _FLAT, _ERROR = 1.7, 3.6, 1.8, 3.0


def _is_new_norm(values: Mapping[str, _Values]) -> bool | None:
    weight, bias, mean, variance = (values.get(name) for name in ("weight", "bias", *RUNNING_STATISTICS))
    if weight is None:
        return None
    has_bias = bias is not None and bool(bias.any())
    if not (weight == 1).all() or has_bias:
        return False if has_bias or np.ptp(weight) else None  # a constant weight may be an initialization
    if mean is None or variance is None:
        return True
    # The running statistics may move in training mode, although the layer is frozen.
    return True if not mean.any() and (variance == 1).all() else None


def _kurtosis(values: _Values) -> float:
    centered = values - values.mean()
    square = float((centered**2).mean())
    return float((centered**4).mean()) / square**2 if square else math.nan


_GATES = {"RNN": (1,), "GRU": (3,), "LSTM": (4,)}


def _bound(kind: str, tensor: Tensor, values: _Values) -> float | None:
    """Return the bound of torch's uniform initializations that a weight has; None if it has none of them."""
    largest, count = float(abs(values).max()), len(values)
    if not _kurtosis(values) < _FLAT + _ERROR / math.sqrt(count):
        return None
    field_size = math.prod(tensor.shape[2:])
    into, out = tensor.shape[1] * field_size, tensor.shape[0] * field_size
    # In this order: linear layers and convolutions, Xavier, Kaiming, and recurrent layers with this number of gates.
    squares = [1 / into, 6 / (into + out), 6 / into, *(each / out for each in _GATES.get(kind, ()))]
    rounding = 1 + 2 * torch.finfo(tensor.dtype).eps
    for bound in map(math.sqrt, squares):
        # Of n uniform values, the largest is below 1 - 8 / n of the bound in 3 of 10,000 cases.
        if bound * (1 - 8 / count) <= largest <= bound * rounding:
            return bound * rounding
    return None
