"""A user's functions and metrics as named reductions, whose state can be any value."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_recorder.errors import ArgumentError, imported
from lightning_recorder.module_names import is_metric
from lightning_recorder.portable import Portable, unwrap
from lightning_recorder.reductions.accumulators import (
    Accumulator,
    Fold,
    MergeableAccumulator,
    Metric,
    make_mergeable,
)
from lightning_recorder.reductions.base import Reduction

__all__ = ["Extra", "Extras", "Results", "UserReduction", "as_reductions"]

Extra = Reduction | Metric | Fold | type | str
"""A reduction: a :class:`Reduction`, a ``torchmetrics.Metric``, a function as for ``functools.reduce``, or the class or
import path of one of these."""

# jsonargparse tries the types in this order. In another order, it would save lists as functions, and classes as
# mappings. ``nn.Module`` covers the metrics of torchmetrics.
Extras = Sequence[Extra] | Reduction | nn.Module | Mapping[str, Extra] | Metric | Fold | type | str
"""One reduction, a list of reductions, or a mapping from names to functions and metrics."""

# Associative and commutative functions, which can also combine the results of several processes.
_MERGEABLE: tuple[Callable[..., Any], ...] = (
    torch.add, torch.mul, torch.maximum, torch.minimum, torch.max, torch.min, torch.fmax, torch.fmin, torch.logical_and,
    torch.logical_or, torch.logical_xor, torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor, torch.logaddexp,
    torch.hypot, Tensor.add, Tensor.mul, Tensor.maximum, Tensor.minimum, operator.add, operator.mul, operator.and_,
    operator.or_, operator.xor,
)  # fmt: skip

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class Results(NamedTuple):
    """The results of a reduction at one site."""

    scalars: dict[str, float]
    tensors: dict[str, Tensor]
    """Float64, on the CPU."""


class UserReduction:
    """A function or a metric with a name.

    Args:
        given: A ``torchmetrics.Metric``, or a function of two arguments: the previous result, which is initially the
            first tensor, and the next tensor. Each site has its own copy.
        name: The name of the result; by default the name of the function, or of the class in snake case.

    Raises:
        ArgumentError: If ``given`` is neither a function nor a metric.

    Example:
        >>> peak = UserReduction(torch.maximum, "peak")
        >>> state = peak.new()
        >>> for batch in torch.tensor([[1.0, 5.0], [3.0, 2.0]]):
        ...     _ = state.update(batch)
        >>> peak.results(state).tensors["peak"].tolist(), peak.is_mergeable
        ([3.0, 5.0], True)
    """

    def __init__(self, given: Fold | Metric, name: str = "") -> None:
        self.given = given
        self.name = name or _name_of(given)
        self.new()  # raises argument errors now

    def new(self) -> MergeableAccumulator:
        """Return the empty state of a site."""
        return make_mergeable(self.given, "extra")

    @property
    def described(self) -> str:
        """The reduction as a text that is the same in every process."""
        named = self.given if hasattr(self.given, "__qualname__") else type(self.given)
        return f"{self.name}={named.__module__}.{named.__qualname__}"

    @property
    def is_function(self) -> bool:
        """True for a function, False for a metric."""
        return not isinstance(self.given, Metric)

    @property
    def is_mergeable(self) -> bool:
        """True if the results of several processes can be combined.

        This is possible for metrics that declare ``dist_reduce_fx``, and for associative and commutative functions of
        torch and ``operator``, such as ``torch.add`` and ``torch.maximum``.
        """
        if isinstance(self.given, nn.Module):
            return is_metric(self.given) and not any(True for _ in self.given.children())
        return any(self.given is each for each in _MERGEABLE)

    def results(self, state: Accumulator) -> Results:
        """Return the results of a site by name.

        A number, or a tensor with one element, is a scalar. Mappings and sequences have one result per entry, named
        ``<name>_<key>``.

        Raises:
            ArgumentError: If the result contains something other than tensors and numbers.
        """
        found = Results({}, {})
        for name, tensor in _named(self.name, state.value):
            if tensor.numel() == 1:
                found.scalars[name] = float(tensor)
            else:
                found.tensors[name] = tensor.detach().to("cpu", torch.float64)
        return found

    def __repr__(self) -> str:
        return f"{self.name} ({Portable(self.given, 'extra')})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "given": Portable(self.given, "extra")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, given=unwrap(state["given"]))


def as_reductions(given: Any, taken: Iterable[str] = ()) -> list[Reduction | UserReduction]:
    """Return reductions from a reduction, a function or a metric, a list of these, or a mapping from names to these.

    Args:
        given: The reductions.
        taken: The names of statistics that exist already.

    Classes are instantiated, and import paths are imported. A ``MetricCollection`` becomes one reduction per metric.

    Raises:
        ArgumentError: If an entry is not a reduction, or if two results have the same name.
    """
    found = list(_each(given, ""))
    names = [*taken, *(each.name for each in found if isinstance(each, UserReduction))]
    names += [name for each in found if isinstance(each, Reduction) for name in each.statistics]
    twice = dict.fromkeys(name for name in names if names.count(name) > 1)
    known = next((each.name for each in found if isinstance(each, UserReduction) and each.name in taken), None)
    if known is not None:
        raise ArgumentError(
            f"the statistic {known!r} is always computed: choose another name, as in extra={{'my_{known}': …}}, or "
            "leave it out"
        )
    if twice:
        listed = ", ".join(map(repr, twice))
        raise ArgumentError(
            f"two reductions have the statistics {listed}: remove one of them, or name functions and metrics, as in "
            "extra={'name': function}"
        )
    return found


def _each(given: Any, name: str) -> Iterator[Reduction | UserReduction]:
    if isinstance(given, str):
        given = imported("extra", given)
    if isinstance(given, type):
        given = _instance(given, {})
    if isinstance(given, Mapping) and not is_metric_collection(given):
        if "class_path" in given:
            kind = given["class_path"]
            if isinstance(kind, str):
                kind = _instance(imported("extra", kind), given.get("init_args") or {})
            yield from _each(kind, name)  # LightningCLI has created the instances
            return
        for key, each in given.items():
            yield from _each(each, str(key))
    elif isinstance(given, (Reduction, UserReduction)):
        yield given
    elif is_metric_collection(given):
        for key, each in given.items():
            yield UserReduction(each, f"{name}_{key}" if name else _snake(key))
    elif callable(given) or isinstance(given, Metric):
        yield UserReduction(given, name)
    elif hasattr(given, "__iter__"):
        for each in given:
            yield from _each(each, name)
    else:
        raise ArgumentError(
            "extra takes a Reduction, a torchmetrics.Metric, a function of two arguments, or a list of these, got "
            f"{given!r}"
        )


def is_metric_collection(given: object) -> bool:
    """Return True for a ``torchmetrics.MetricCollection``."""
    return isinstance(given, nn.ModuleDict) and is_metric(given)


def _instance(kind: Any, arguments: Mapping[str, Any]) -> Any:
    try:
        return kind(**arguments)
    except Exception as error:
        called = getattr(kind, "__name__", repr(kind))
        raise ArgumentError(f"extra takes instances; {called}() raised {error!r}: write {called}(…)") from error


def _name_of(given: object) -> str:
    name = getattr(given, "__name__", None) or type(given).__name__
    return "reduced" if name == "<lambda>" else _snake(name)


def _snake(name: str) -> str:
    """Return a name in snake case.

    Example:
        >>> _snake("MeanMetric"), _snake("maximum"), _snake("R2Score")
        ('mean_metric', 'maximum', 'r2_score')
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _named(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_sparse or value.layout in _COMPRESSED:
            value = value.to_dense()
        yield name, torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    elif isinstance(value, (bool, int, float)):
        yield name, torch.tensor(float(value), dtype=torch.float64, device="cpu")
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _named(f"{name}_{key}", part)
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _named(f"{name}_{index}", part)
    else:
        raise ArgumentError(
            f"the result of {name} is a {type(value).__name__}: return a tensor, a number, or a list or mapping of them"
        )
