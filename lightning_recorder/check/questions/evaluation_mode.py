"""Find modules that are in training mode during evaluation, or in evaluation mode during training.

During evaluation, no dropout may be active and every module must be in evaluation mode. In training, modules with
parameters, dropout or BatchNorm must be in training mode: a model that was loaded for inference often stays in
evaluation mode. Two evaluations of one batch must be equal, unless the model draws random numbers on purpose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from lightning_recorder.check.answer import Answer, NoAnswerError, Question
from lightning_recorder.check.influence import is_changed
from lightning_recorder.internals.module_tree import own_parameters_of
from lightning_recorder.module_names import named_submodules

if TYPE_CHECKING:
    from lightning_recorder.check.bench import Bench
    from lightning_recorder.check.passes import Pass

__all__ = ["QUESTION"]

_FEW = 4  # the maximum number of names in a text
_MODAL = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)


def answer(bench: Bench) -> Answer:
    """Evaluate a batch twice, and check the modes of the modules."""
    batch = bench.validation_batch
    has_step = bench.functions.evaluate is not None and batch is not None
    first, second = (
        bench.evaluate(batch) if has_step else bench.observe(training=False, other_numbers=True) for _ in range(2)
    )
    if not first.modules and not first.losses:
        raise NoAnswerError("no module was called in evaluation")
    if first.dropouts:
        return Answer("wrong", "dropout is active in evaluation: pass training=self.training", line=first.dropouts[0])
    wrong_mode = [each for each in first.modules if each.is_training and _is_modal(bench, each.name)]
    if wrong_mode:
        text = f"{wrong_mode[0].name} ({wrong_mode[0].kind}) is in training mode in evaluation"
        return Answer("wrong", text, module=wrong_mode[0].name)
    if asleep := _asleep(bench):
        names = ", ".join(asleep[:_FEW]) + (f" and {len(asleep) - _FEW} more" if len(asleep) > _FEW else "")
        text = f"in evaluation mode during training, although their parameters are trained: {names}"
        return Answer("look", text, module=asleep[0])
    if _is_random(first, second):
        return Answer("ok", "evaluation draws random numbers, without a dropout")
    return Answer("ok", "two evaluations of a batch are equal, and no dropout is active")


def _is_random(first: Pass, second: Pass) -> bool:
    return is_changed(first.predictions, second.predictions)


def _is_modal(bench: Bench, name: str) -> bool:
    """Return True for a module whose forward pass differs between training and evaluation mode."""
    module = named_submodules(bench.net).get(name)
    return isinstance(module, _MODAL) and getattr(module, "p", 1.0) != 0.0


def _asleep(bench: Bench) -> list[str]:
    """Return the dropout and normalization modules in evaluation mode whose parent has trained parameters."""
    modules = named_submodules(bench.net)
    called = {each.name for each in bench.first.modules if not each.is_training}
    trained = {
        name
        for name, each in modules.items()
        if any(parameter.requires_grad for parameter in own_parameters_of(each).values())
    }
    found = []
    for name in sorted(called):
        if _is_modal(bench, name):
            parent = name.rpartition(".")[0]
            if any(other == name or other.startswith(f"{parent}." if parent else "") for other in trained):
                found.append(name)
    return found


QUESTION = Question(
    "evaluation",
    "Is evaluation evaluation?",
    "in evaluation no dropout is active, and in training every trained module is in training mode",
    answer,
    steps=1.0,
)
