"""Who called a function of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_recorder.graph.caller import Caller, find_caller


def calling(module: str, inner: Callable[[], Caller], name: str = "step") -> Callable[[], Caller]:
    """A function that lies in a module of that name and calls another."""
    globals_: dict[str, Any] = {"__name__": module, "inner": inner}
    exec(f"def {name}(): return inner()", globals_)
    function: Callable[[], Caller] = globals_[name]
    return function


@pytest.mark.parametrize(
    ("module", "trainer"),
    [
        ("lightning.pytorch.loops.optimization.automatic", True),
        ("lightning.fabric.utilities.apply_func", True),
        ("pytorch_lightning.core.module", True),
        ("lightning_fabric.plugins.precision.amp", True),
        ("torch.optim.adam", True),
        ("torch.amp.grad_scaler", True),
        ("lightning.pytorch.demos.transformer", False),
        ("pytorch_lightning.demos.boring_classes", False),
        ("__main__", False),
        ("my.models", False),
        ("lightning_models.gan", False),
        ("lightningmodels", False),
        ("torchvision.models.resnet", False),
        ("transformers.models.bert.modeling_bert", False),
    ],
)
def test_the_module_of_the_caller_decides(module: str, trainer: bool) -> None:
    """Lightning, torch's optimisers and its gradient scaler are trainers; models are everything else."""
    assert calling(module, find_caller)().trainer is trainer


def test_torch_in_between_does_not_count() -> None:
    """What torch, the standard library or this package does on the way is not the caller."""
    inner: Callable[[], Caller] = find_caller
    for module in ("torch.nn.functional", "torch.overrides", "contextlib", "functools", "lightning_recorder.graph"):
        inner = calling(module, inner)
    assert calling("lightning.pytorch.loops", inner)().trainer is True
    assert calling("my.models", inner)().trainer is False


def test_the_nearest_caller_decides() -> None:
    """A model that Lightning calls is a model, and an optimiser that a model calls no model."""
    assert calling("lightning.pytorch.loops", calling("my.models", find_caller))().trainer is False
    assert calling("my.models", calling("torch.optim.sgd", find_caller))().trainer is True


def test_averaged_model() -> None:
    """The forward pass of torch's averaged model is a model's, the averaging is not."""
    assert calling("torch.optim.swa_utils", find_caller, "forward")().trainer is False
    assert calling("torch.optim.swa_utils", find_caller, "update_parameters")().trainer is True


def test_function_modes_in_between() -> None:
    """A function mode of the user's stands between a function and who called it."""
    inner = calling("my.modes", find_caller, "__torch_function__")
    assert calling("lightning.pytorch.loops", inner)().trainer is True
    assert calling("my.models", inner)().trainer is False
