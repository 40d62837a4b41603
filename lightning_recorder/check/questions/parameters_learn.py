"""Find trained parameters that do not learn.

A parameter that requires a gradient must be in an optimizer, must get a nonzero gradient in one of a dozen steps, and
must change: in its dtype, an update may be rounded to nothing. A gradient that is zero only in the first step is not a
fault: it occurs in the first matrix of LoRA, and in blocks followed by a projection that is initialized to zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_recorder.check.answer import Answer, NoAnswerError, Question

if TYPE_CHECKING:
    from lightning_recorder.check.bench import Bench

__all__ = ["QUESTION"]

_FEW = 4  # the maximum number of names in a text


def answer(bench: Bench) -> Answer:
    """Compare the parameters of the model with those of the optimizers, and check gradients and updates."""
    names = {id(each): name for name, each in bench.parameters.items()}
    places = [id(each) for optimizer in bench.functions.optimizers for each in _of(optimizer)]
    if not places:
        raise NoAnswerError("there is no optimizer")
    if not names.keys() & set(places):
        return Answer("wrong", "the optimizer has other parameters than the model: it was made for another model")
    if not bench.functions.is_automatic:
        return _of_gradients(bench)
    trained = bench.trained
    absent = [name for key, name in names.items() if key not in places]
    silent = [name for name in bench.parameters if name not in trained.reached]
    zero = [name for name in bench.parameters if name in trained.reached and name not in trained.with_gradient]
    inside = [name for name in trained.with_gradient if name not in absent]
    still = [name for name in bench.parameters if name in inside and name not in trained.moved]
    numbers = {"parameters": float(len(names)), "moved": float(len(trained.moved))}
    for found, text in (
        (absent, "in no optimizer"),
        (silent, "without a gradient"),
        (zero, "with a gradient of zero"),
        (still, "with a gradient, but an update too small for the number format or a rate of zero"),
    ):
        if found:
            count = f"{len(found)} of {len(names)} parameters {text}: {_listed(found)}"
            return Answer("wrong" if len(found) == len(names) else "look", count, numbers, module=found[0])
    return Answer("ok", f"all {len(names)} parameters have a gradient and change", numbers)


def _of(optimizer: object) -> list[object]:
    return [each for group in getattr(optimizer, "param_groups", ()) for each in group["params"]]


def _of_gradients(bench: Bench) -> Answer:
    """Return the answer for manual optimization. Only gradients are compared, because no optimizer is run."""
    gradients = bench.first_gradients
    silent = [name for name, each in gradients.items() if each is None or not bool(each.any())]
    if len(silent) == len(gradients):
        return Answer("wrong", "no parameter has a gradient")
    if silent:
        text = f"{len(silent)} of {len(gradients)} parameters without a gradient: {_listed(silent)}"
        return Answer("look", text, module=silent[0])
    return Answer("ok", f"all {len(gradients)} parameters have a gradient")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_FEW]) + (f" and {len(names) - _FEW} more" if len(names) > _FEW else "")


QUESTION = Question(
    "parameters-learn",
    "Does every trained parameter learn?",
    "each parameter that requires a gradient is in an optimizer, has a gradient, and changes in its number format",
    answer,
    steps=0.5,
)
