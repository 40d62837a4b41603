"""Find custom functions with a wrong gradient.

Each ``torch.autograd.Function`` of the step is called again with the tensors that it received, in float64. Its backward
pass is compared with a difference quotient along a random direction. A function whose forward pass is the identity or
piecewise constant has another gradient on purpose: gradient reversal, clipping, and straight-through estimators.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_recorder.check.answer import Answer, NoAnswerError, Question
from lightning_recorder.errors import describe_error

if TYPE_CHECKING:
    from lightning_recorder.check.bench import Bench

__all__ = ["QUESTION"]

_EPSILON = 1e-6
_CLOSE = 1e-2  # the tolerated relative difference
_MOST = 4096  # the maximum number of elements of a tensor


def answer(bench: Bench) -> Answer:
    """Compare each custom backward pass with a difference quotient."""
    with bench.restored():
        seen = bench.forward(bench.batch)
        kinds = _functions(seen.loss)
        if not kinds:
            raise NoAnswerError("the step uses no custom autograd function")
        with _recorded(kinds) as calls:
            bench.forward(bench.batch)
    texts, reasons = [], []
    for kind, arguments in calls.items():
        try:
            text = _compare(kind, arguments)
        except Exception as error:  # noqa: BLE001 - a function may reject float64 or raise anything
            reasons.append(f"{kind.__name__} cannot be called again: {describe_error(error)}")
            continue
        if text.startswith("the gradient"):
            return Answer("wrong", f"{kind.__name__}: {text}", module=kind.__name__)
        texts.append(f"{kind.__name__}: {text}")
    if not texts:
        raise NoAnswerError("; ".join(reasons) or "no call of a custom autograd function was seen")
    return Answer("ok", "; ".join(texts))


def _functions(loss: Tensor | None) -> set[Any]:
    """Return the custom autograd functions in the graph of a loss."""
    todo: list[Any] = [] if loss is None else [loss.grad_fn]
    seen, found = {None}, set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        kind = getattr(type(node), "_forward_cls", None)
        if kind is not None and not kind.__module__.startswith("torch."):
            found.add(kind)
        todo += [each for each, _ in node.next_functions]
    return found


@contextmanager
def _recorded(kinds: set[Any]) -> Iterator[dict[Any, tuple[Any, ...]]]:
    """Record the arguments of the first call of each function inside the context."""
    calls: dict[Any, tuple[Any, ...]] = {}
    had = {kind: "apply" in vars(kind) for kind in kinds}
    before = {kind: vars(kind).get("apply") for kind in kinds}

    def recording(kind: Any) -> Any:
        original = kind.apply

        def apply(*args: Any, **kwargs: Any) -> Any:
            if kind not in calls and not kwargs:
                calls[kind] = tuple(each.detach().clone() if isinstance(each, Tensor) else each for each in args)
            return original(*args, **kwargs)

        return staticmethod(apply)

    try:
        for kind in kinds:
            kind.apply = recording(kind)
        yield calls
    finally:
        for kind in kinds:
            if had[kind]:
                kind.apply = before[kind]
            else:
                del kind.apply


def _compare(kind: Any, arguments: tuple[Any, ...]) -> str:
    """Return a text about the gradient of a function. The text begins with "the gradient" if the gradient is wrong."""
    given = [_float64(each) for each in arguments]
    places = [index for index, each in enumerate(given) if isinstance(each, Tensor) and each.is_floating_point()]
    leaves = [given[index].requires_grad_() for index in places]
    with torch.enable_grad():
        out = _first(kind.apply(*given))
    generator = torch.Generator("cpu").manual_seed(0)
    weight = _random(out, generator)
    # The annotations of torch do not say that a gradient may be None.
    found: tuple[Tensor | None, ...] = torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)
    directions = [_random(each, generator) for each in leaves]
    known = [(g, d, p) for g, d, p in zip(found, directions, places, strict=True) if g is not None]
    if not known:
        return "it has no gradient"
    analytic = sum(float((gradient * direction).sum()) for gradient, direction, _ in known)
    if any(out.shape == leaf.shape and torch.equal(out, leaf) for leaf in leaves):
        return "it changes nothing in the forward pass, so its gradient is its purpose"
    ends = [_moved(kind, given, known, weight, sign * _EPSILON) for sign in (1.0, -1.0)]
    numeric = (ends[0] - ends[1]) / (2 * _EPSILON)
    if abs(numeric) < _CLOSE * abs(analytic):
        return "it changes in steps, so its gradient is an estimate"
    if abs(numeric - analytic) > _CLOSE * max(abs(numeric), abs(analytic)):
        return f"the gradient is {analytic:.4g} along a direction in which the function changes by {numeric:.4g}"
    return "its gradient is that of its forward pass"


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return random numbers in the shape of a tensor, without using the generators of the program."""
    return torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu").to(like.device)


def _moved(kind: Any, given: list[Any], known: list[tuple[Tensor, Tensor, int]], weight: Tensor, size: float) -> float:
    moved = [each.detach() if isinstance(each, Tensor) else each for each in given]
    for _, direction, place in known:
        moved[place] = moved[place] + size * direction
    with torch.no_grad():
        return float((_first(kind.apply(*moved)) * weight).sum())


def _float64(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    if value.numel() > _MOST:  # a few rows are enough if rows are independent
        value = value[: max(1, _MOST // max(1, value[0].numel()))] if value.dim() > 1 else value
    return value.double()


def _first(out: Any) -> Tensor:
    found: Tensor = next(each for each in (out if isinstance(out, tuple) else (out,)) if isinstance(each, Tensor))
    return found


QUESTION = Question(
    "custom-gradients",
    "Do custom gradients hold?",
    "the backward pass of a custom function is the derivative of its forward pass",
    answer,
    steps=1.0,
)
