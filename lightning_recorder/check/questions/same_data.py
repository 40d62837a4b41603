"""Compare the batches of training and validation.

Their tensors must have the same number of dimensions, dtype and scale. The inputs must have a usable scale: images that
were divided by 255 twice have values of 0.002.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_recorder.check.answer import Answer, NoAnswerError, Question
from lightning_recorder.check.batches import named_tensors

if TYPE_CHECKING:
    from lightning_recorder.check.bench import Bench

__all__ = ["QUESTION"]

_OTHER, _STRANGE = 4.0, 30.0  # limits of the ratio of the standard deviations of training and validation
_SMALL, _LARGE = 0.01, 1000.0  # the limits of the root mean square of an input
_MANY = 64  # the minimum number of values to measure a scale


def answer(bench: Bench) -> Answer:
    """Compare the scales and the formats of a training and a validation batch."""
    tensors = named_tensors(bench.batch)
    inputs = set(bench.influences.inputs) if bench.functions.is_automatic else set(tensors)
    strange = [text for name in tensors if name in inputs and (text := _size(name, tensors[name]))]
    if bench.validation_batch is None:
        if strange:
            return Answer("look", strange[0])
        raise NoAnswerError("no batch of the validation was seen before the training")
    others = named_tensors(bench.validation_batch)
    if tensors.keys() != others.keys():
        if strange:
            return Answer("look", strange[0])
        raise NoAnswerError("the batches of training and validation have different parts")
    for name, tensor in tensors.items():
        found = _compared(name, tensor, others[name], is_input=name in inputs)
        if found is not None:
            return found
    if strange:
        return Answer("look", strange[0])
    return Answer("ok", "the tensors of both batches have the same formats and scales")


def _size(name: str, tensor: Tensor) -> str:
    """Return a text if an input has an unusual scale, otherwise an empty string."""
    if not tensor.is_floating_point() or tensor.numel() < _MANY:
        return ""
    values = tensor.detach().double()
    if not bool(torch.isfinite(values).all()):
        return f"{name} has values that are not finite"
    size = float(values.square().mean().sqrt())
    if 0 < size < _SMALL:
        return f"{name} has values of {size:.2g}: was it divided twice?"
    return f"{name} has values of {size:.2g}: it is not normalized" if size > _LARGE else ""


def _compared(name: str, tensor: Tensor, other: Tensor, *, is_input: bool) -> Answer | None:
    if tensor.dtype != other.dtype:
        text = f"{name} is {tensor.dtype} in training and {other.dtype} in validation"
        return Answer("look", text.replace("torch.", ""))
    if tensor.dim() != other.dim():
        return Answer("look", f"{name} has {tensor.dim()} dimensions in training and {other.dim()} in validation")
    if not tensor.is_floating_point() or not is_input or min(tensor.numel(), other.numel()) < _MANY:
        return None
    (mean, std), (other_mean, other_std) = _moments(tensor), _moments(other)
    if not std or not other_std:
        return None
    ratio = max(std / other_std, other_std / std)
    shift = abs(mean - other_mean) / max(std, other_std)
    if ratio > _OTHER or shift > _OTHER:
        text = (
            f"{name} has mean {mean:.3g} and standard deviation {std:.3g} in training, {other_mean:.3g} and "
            f"{other_std:.3g} in validation"
        )
        return Answer("wrong" if ratio > _STRANGE else "look", text, {"ratio": ratio, "shift": shift})
    return None


def _moments(tensor: Tensor) -> tuple[float, float]:
    values = tensor.detach().double()
    return float(values.mean()), float(values.std())


QUESTION = Question(
    "same-data",
    "Do training and validation batches agree?",
    "the same formats and scales, and inputs of a usual size",
    answer,
    steps=0.1,
)
