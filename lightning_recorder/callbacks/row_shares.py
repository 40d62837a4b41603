"""Measure the share of each sample in the loss and in the gradient norm of a step while the step runs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import Self, override

from lightning_recorder.functions.table import FUNCTIONS
from lightning_recorder.functions.tap import KNOWN
from lightning_recorder.internals.autograd import without_functions
from lightning_recorder.internals.compiled import EagerStance
from lightning_recorder.structure import ignore_unknown, iter_tensors

__all__ = ["RowShares"]

_FAR = 10.0  # a sample stands out if its largest value is this many times the largest value of every other sample
_SAME = 1e-3  # the relative tolerance for equal shares in two runs
_MOST_GROUPS = 2
_LOSSES = {function for function, name in KNOWN.items() if FUNCTIONS[name].kind == "losses"}
_ADDING = {torch.mean, Tensor.mean, torch.sum, Tensor.sum, torch.nanmean, Tensor.nanmean}


class RowShares(TorchFunctionMode):
    """Measures the contribution of each sample to a step that runs inside the context.

    The loss is treated as a sum of reductions: torch losses, means and sums. Each of these terms is computed again
    without its reduction, and weighted by the derivative of the loss with respect to it. For the gradient norm, each
    call with a parameter among its arguments contributes the norm of the sample's inputs times the norm of the gradient
    of the sample's outputs. For a linear layer, this is the norm of the weight gradient of the sample alone.

    The shares are not exact if samples depend on each other, as in a normalization over the batch, or if the first
    dimension is not the batch dimension. The result of :meth:`suspects` must therefore be checked by a run without
    these samples.

    Args:
        batch: The batch.
        samples: The number of its samples.
        parameters: The parameters of the model.
        of_gradient: Measure the shares in the gradient norm instead of the loss.
    """

    def __init__(self, batch: Any, samples: int, parameters: Iterable[nn.Parameter], *, of_gradient: bool) -> None:
        super().__init__()
        self._batch, self._samples = batch, samples
        self._parameters = {id(each) for each in parameters} if of_gradient else set()
        self._stance = EagerStance()
        self._parts: list[tuple[Tensor, Tensor]] = []  # the results of the reductions, each with its values by sample
        self._bad: Tensor | None = None  # the samples with NaN or infinity in the first result that has any
        self._shares: Tensor | None = None
        self._is_of_gradient = of_gradient
        self.draws = False
        """True if the step has drawn random numbers."""

    @override
    def __enter__(self) -> Self:
        self._stance.hold()
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]  # torch has no annotations there

    @override
    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)  # type: ignore[no-untyped-call]  # as above
        self._stance.release()

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        first = result[0] if isinstance(result, tuple) and result else result
        if isinstance(first, Tensor) and first.is_floating_point():
            try:
                with without_functions():
                    self._note(func, args, kwargs, first)
            except Exception:  # noqa: BLE001 - a function with other arguments; the samples are then found in parts
                pass
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Tensor) -> None:
        if func in _LOSSES or func in _ADDING:
            self._note_sum(func, args, kwargs, result)
        if self._bad is None and (rows := self._by_sample(result)) is not None:
            self._note_bad(rows)
        if self._parameters and result.requires_grad:
            self._note_gradient((*args, *kwargs.values()), result)

    def _by_sample(self, tensor: Any) -> Tensor | None:
        """Return the tensor as ``[samples, values]``; None if its first dimension is not a multiple of the samples."""
        if not isinstance(tensor, Tensor) or not tensor.dim() or not len(tensor) or len(tensor) % self._samples:
            return None
        return tensor.detach().reshape(self._samples, -1)

    def _note_sum(self, func: Any, args: Any, kwargs: Any, result: Tensor) -> None:
        if result.dim() or not result.requires_grad:
            return
        values: Any = args[0] if args else None
        if func in _LOSSES:
            bound = inspect.signature(func).bind(*args, **kwargs)
            bound.arguments = {k: v for k, v in bound.arguments.items() if k not in ("size_average", "reduce")}
            bound.arguments["reduction"] = "none"
            with torch.no_grad():
                values = func(*bound.args, **bound.kwargs)
        rows = self._by_sample(values)
        if rows is not None:
            self._parts.append((result, rows.double().sum(1)))

    def _note_bad(self, rows: Tensor) -> None:
        # Minus infinity often comes from a mask, so it does not count as bad.
        bad = (rows.isnan() | rows.isposinf()).any(1)
        if bool(bad.any()):
            self._bad = bad

    def _note_gradient(self, args: Iterable[Any], result: Tensor) -> None:
        # A recurrent layer gets its weights in a list, so lists of tensors are searched as well.
        several = (each if isinstance(each, (list, tuple)) else (each,) for each in args)
        given = [each for group in several for each in group if isinstance(each, Tensor)]
        if self._by_sample(result) is None or not any(id(each) in self._parameters for each in given):
            return
        others = [self._by_sample(each) for each in given if id(each) not in self._parameters]
        inputs = next((_norms(each) for each in others if each is not None), None)
        if inputs is not None:
            result.register_hook(partial(self._add_gradient, inputs))

    def _add_gradient(self, inputs: Tensor, gradient: Tensor) -> None:
        with without_functions():
            rows = self._by_sample(gradient)
            if rows is not None:
                share = inputs * _norms(rows)
                self._shares = share if self._shares is None else self._shares + share

    def read_loss(self, loss: Tensor) -> None:
        """Receive the loss of the step before its backward pass."""
        if self._is_of_gradient or not self._parts or not loss.requires_grad:
            return
        results = [result for result, _ in self._parts]
        weights: Sequence[Tensor | None] = torch.autograd.grad(loss, results, retain_graph=True, allow_unused=True)
        for (result, rows), weight in zip(self._parts, weights, strict=True):
            if weight is None:
                continue
            total = rows.sum()
            scale = weight.double() * result.detach().double() / total  # includes the weights of a weighted mean
            share = rows * scale if bool(scale.isfinite()) and bool(total != 0) else rows
            self._shares = share if self._shares is None else self._shares + share

    def suspects(self, is_bad: Callable[[float], bool], whole: float) -> list[list[int]]:
        """Return groups of samples that may make a value bad. The likeliest group, and its worst sample, come first.

        Args:
            is_bad: A function that returns True if a loss or gradient norm is bad.
            whole: The loss or gradient norm of all samples.
        """
        shares = None if self._shares is None else self._shares.cpu()
        found = [[] if shares is None else self._explaining(shares, is_bad, whole)]
        if not math.isfinite(whole) and self._bad is not None:
            found.append(torch.nonzero(self._bad.cpu()).flatten().tolist())
        if self.standing_out is not None:
            found.append([self.standing_out])
        # Each group costs a replay, so only a few small groups are returned.
        usable = [each for each in found if 0 < len(each) <= self._samples // 2]
        return [each for place, each in enumerate(usable) if each not in usable[:place]][:_MOST_GROUPS]

    def agree(self, other: RowShares, own_places: Sequence[int], other_places: Sequence[int]) -> bool:
        """Return True if the relative shares of samples are the same in two runs. The places are their indices."""
        if self._shares is None or other._shares is None or not own_places:
            return False
        own, others = self._shares[list(own_places)], other._shares[list(other_places)]
        return torch.allclose(own * others.sum(), others * own.sum(), rtol=_SAME, atol=0.0)

    def _explaining(self, shares: Tensor, is_bad: Callable[[float], bool], whole: float) -> list[int]:
        """Return the smallest set of samples without which the value would be usual."""
        if not math.isfinite(whole) or not bool(shares.isfinite().all()):
            return torch.nonzero(~shares.isfinite()).flatten().tolist()
        shares, order = shares.sort(descending=True)
        rest = float(shares.sum())
        outside = 0.0 if self._is_of_gradient else whole - rest  # such as a weight penalty, which belongs to no sample
        scale = whole / rest if self._is_of_gradient and rest else 1.0
        for count, share in enumerate(shares[: self._samples // 2].tolist(), 1):
            rest -= share
            if not is_bad(outside + scale * rest * self._samples / (self._samples - count)):
                return order[:count].tolist()
        return []

    @cached_property
    def standing_out(self) -> int | None:
        """The sample whose values in the batch are far larger than the values of all other samples, or None."""
        best = _FAR
        found: int | None = None
        for _, tensor in iter_tensors(self._batch, unknown=ignore_unknown):
            rows = self._by_sample(tensor) if tensor.is_floating_point() else None
            if rows is not None and rows.numel():
                sizes = rows.abs().amax(1).double().nan_to_num(math.inf)
                (first, second), (place, _) = (each.tolist() for each in sizes.topk(2))
                if first > best * second:
                    best, found = first / second if second else math.inf, int(place)
        return found


def _norms(rows: Tensor) -> Tensor:
    if not rows.is_floating_point():  # such as token ids
        return torch.ones(len(rows), dtype=torch.float64, device=rows.device)
    found: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return found
