"""A fault in a function is found like the same fault in a module; the recorders and the receipt know functions."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_recorder import (
    ActivationRecorder,
    ArgumentError,
    GradientRecorder,
    GraphRecorder,
    MemorySink,
    Outputs,
    ParameterRecorder,
)
from lightning_recorder.functions.tap import _FunctionMode
from lightning_recorder.taps import Site
from tests.callbacks.models import digits

Function = Callable[[Tensor], Tensor]

# The activation as a module and as a function, with a factor and an offset of its input that make it sick.
FAULTS: dict[str, tuple[Callable[[], nn.Module], Function, float, float]] = {
    "tanh": (nn.Tanh, torch.tanh, 60.0, 0.0),
    "sigmoid": (nn.Sigmoid, Tensor.sigmoid_, 60.0, 0.0),
    "relu": (nn.ReLU, F.relu, 1.0, -30.0),
    "hardtanh": (
        functools.partial(nn.Hardtanh, -0.01, 0.01),
        functools.partial(F.hardtanh, min_val=-0.01, max_val=0.01),
        1.0,
        0.0,
    ),
    "softmax": (functools.partial(nn.Softmax, -1), functools.partial(Tensor.softmax, dim=-1), 80.0, 0.0),
}


class Net(LightningModule):
    """Layers with an activation between them, which is a module or a function."""

    def __init__(self, act: Function, factor: float = 1.0, offset: float = 0.0) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 10)
        if isinstance(act, nn.Module):
            self.act = act
        else:
            object.__setattr__(self, "act", act)
        self.factor, self.offset = factor, offset

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.first(x.flatten(1)) * self.factor + self.offset)
        logits: Tensor = self.head(F.gelu(self.second(x)))
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def fit(folder: Path, model: LightningModule, *callbacks: Any, steps: int = 12, batches: int = 1) -> Any:
    """Train a model and return the parsed receipt and the findings."""
    trainer = Trainer(
        max_steps=steps,
        max_epochs=-1,
        accumulate_grad_batches=batches,
        callbacks=list(callbacks),
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        log_every_n_steps=1,
    )
    trainer.fit(model, digits(8))
    read = {path.stem: json.loads(path.read_text()) for path in (folder / "recorder").glob("*.json")}
    return read["receipt"], read.get("findings", {}).get("findings", [])


def recorders(interval: int = 2) -> list[Any]:
    """Return the recorders that the rules need."""
    options: dict[str, Any] = {
        "every_n_train_steps": interval,
        "outputs": Outputs(plots=False, report=False),
        "strict": True,
    }
    every = [kind(**options) for kind in (ActivationRecorder, GradientRecorder, ParameterRecorder)]
    return [GraphRecorder(formats=(), strict=True), *every]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_in_both_forms(tmp_path: Path, fault: str) -> None:
    """Saturated, dead and collapsed activations give the same findings as a module and as a function."""
    module, function, factor, offset = FAULTS[fault]
    found: list[Any] = []
    for form in (module(), function):
        seed_everything(3, verbose=False)
        _, findings = fit(tmp_path / str(len(found)), Net(form, factor, offset), *recorders())
        found.append([{**each, "trace": None} for each in findings])
    named = json.loads(json.dumps(found[0]).replace('"act"', f'"{fault}"').replace("act ", f"{fault} "))
    assert [each["module"] for each in found[1]] == [fault]
    assert [(each["rule"], each["severity"], each["module"], each["verdict"]) for each in found[1]] == [
        (each["rule"], each["severity"], each["module"], each["verdict"]) for each in named
    ]


@pytest.mark.parametrize("act", [nn.Tanh(), torch.tanh])
def test_healthy_functions_have_no_finding(tmp_path: Path, act: Function) -> None:
    """A hinge in the loss, which is zero for most samples of a trained model, is no dead layer."""

    class Hinge(Net):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            logits = self(batch[0])
            margin = F.relu(logits.detach().abs().amax() - 100 + 0 * logits).mean()  # zero
            chance = torch.softmax(logits.detach() * 1e6, -1)  # sure, and for a metric only
            return F.cross_entropy(logits, batch[1]) + margin + 0 * chance.sum()

    seed_everything(3, verbose=False)
    assert fit(tmp_path, Hinge(act), *recorders())[1] == []


def test_the_receipt_counts_functions(tmp_path: Path) -> None:
    """The receipt lists the functions apart from the modules, and says which sites they have."""
    activations, gradients = ActivationRecorder(), GradientRecorder(functions=True)
    receipt, _ = fit(tmp_path, Net(torch.tanh), activations, gradients, steps=2)
    assert receipt["activations"]["functions"] == ["tanh", "gelu", "cross_entropy"]
    assert receipt["gradients"]["functions"] == ["gelu", "tanh"]
    assert activations._pipeline.coverage is None  # the run has ended
    assert [site.name for site in activations.latest if site.path == "out"] == [
        *("first", "second", "head", "tanh", "gelu", "cross_entropy")
    ]
    sides = {path: seen.scalars for (name, path), seen in activations.latest.items() if name == "cross_entropy"}
    assert list(sides) == [
        *("out", "in.prediction", "in.target", "in.target.ignored"),
        *("in.prediction.classes", "in.target.classes"),
    ]
    assert (sides["in.target.ignored"]["mean"], sides["in.prediction"]["count"]) == (0.0, 80.0)
    assert activations.latest[Site("tanh", "out")].scalars["max"] <= 1


def test_what_enters_a_loss_has_no_curves(tmp_path: Path) -> None:
    """The prediction and the target are in the records; a loss has the curves of its value alone."""
    sink = MemorySink()
    fit(tmp_path, Net(torch.tanh), ActivationRecorder(every_n_train_steps=1, sinks=[sink]), steps=2)
    tags = {tag.rpartition("/")[0] for tag in sink.scalars if "cross_entropy" in tag}
    assert tags == {"activations/cross_entropy"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"functions": False}, ["first", "second", "head"]),
        ({"functions": "losses"}, ["first", "second", "head", "cross_entropy"]),
        ({"functions": ["gelu"], "exclude": "first"}, ["second", "head", "gelu"]),
        ({"names": "gelu"}, ["gelu"]),
        ({"names": ["head", "**.tanh"]}, ["head", "tanh"]),
    ],
)
def test_functions_are_chosen(tmp_path: Path, options: Any, expected: list[str]) -> None:
    """``functions`` chooses functions by kind or name; ``names`` and ``exclude`` apply to their sites."""
    recorder = ActivationRecorder(strict=True, outputs=Outputs(findings=False), **options)
    fit(tmp_path, Net(torch.tanh), recorder, steps=1)
    assert list(dict.fromkeys(site.name for site in recorder.latest if site.name)) == expected


def test_unknown_functions_raise() -> None:
    """A wrong name raises at construction and names the closest one."""
    with pytest.raises(ArgumentError, match=r"functions must be .*did you mean 'relu'"):
        ActivationRecorder(functions="relo")


class Twice(torch.optim.SGD):
    """Evaluates the loss again after its step."""

    @override
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        closure()
        return loss


@pytest.mark.parametrize(
    ("optimizer", "modes", "names"), [(torch.optim.SGD, 0, {"gelu"}), (Twice, 1, {"gelu", "gelu#2"})]
)
def test_an_optimizer_that_steps(optimizer: type[torch.optim.SGD], modes: int, names: set[str], tmp_path: Path) -> None:
    """An optimizer of torch steps without the function mode; what another one calls after its step is recorded."""
    seen: list[int] = []

    class Model(Net):
        """Notes the number of function modes after a step."""

        @override
        def configure_optimizers(self) -> Any:
            found = optimizer(self.parameters(), 0.01)
            found.register_step_post_hook(lambda *_: seen.append(torch._C._len_torch_function_stack()))
            return found

    activations, gradients = (kind(every_n_train_steps=1) for kind in (ActivationRecorder, GradientRecorder))
    fit(tmp_path, Model(F.relu), activations, gradients, steps=2)
    assert set(seen) == {modes}
    assert {site.name for site in activations.latest if site.name.startswith("gelu")} == names


@pytest.mark.parametrize(
    ("batches", "has_penalty", "modes", "names"),
    [
        (1, False, [0, 0], {"gelu"}),
        (2, False, [1, 1], {"gelu"}),
        (1, True, [1, 1], {"gelu", "gelu#2"}),
    ],
)
def test_the_mode_ends_before_gradients_are_cleared(
    batches: int, has_penalty: bool, modes: list[int], names: set[str], tmp_path: Path
) -> None:
    """The mode ends with the loss, unless batches are accumulated or the model adds to its loss before the backward."""
    seen: list[int] = []

    class Penalized(Net):
        """Adds to its loss."""

        @override
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            (loss + F.gelu(self.head.weight).sum()).backward()

    class Notes(Callback):
        """Notes the number of function modes."""

        @override
        def on_before_backward(self, *args: Any) -> None:
            seen.append(torch._C._len_torch_function_stack())

    activations = ActivationRecorder(every_n_train_steps=1)
    model = (Penalized if has_penalty else Net)(F.relu)
    fit(tmp_path, model, activations, Notes(), steps=2, batches=batches)
    assert seen == modes * batches
    assert {site.name for site in activations.latest if site.name.startswith("gelu")} == names


def test_a_recorded_step_calls_the_mode_for_the_functions_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The properties of tensors that the recorders read do not pass through the function mode after the first step."""
    callers: list[str] = []

    class Model(Net):
        """Forgets the callers of the first step, in which states are allocated."""

        @override
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if not batch_idx:
                callers.clear()

    observe = _FunctionMode.__torch_function__

    def noting(mode: Any, *args: Any, **kwargs: Any) -> Any:
        callers.append(str(sys._getframe(1).f_globals.get("__name__")))
        return observe(mode, *args, **kwargs)

    monkeypatch.setattr(_FunctionMode, "__torch_function__", noting)
    fit(
        tmp_path,
        Model(F.relu),
        *(kind(every_n_train_steps=1) for kind in (ActivationRecorder, GradientRecorder)),
        steps=3,
    )
    assert "tests.callbacks.test_functions" in callers
    assert not [each for each in callers if each.startswith("lightning_recorder")]


class Dense(nn.Module):
    """A layer with its activation, as in Keras."""

    def __init__(self, inputs: int, outputs: int, activation: Function) -> None:
        super().__init__()
        self.kernel, self.bias = nn.Parameter(torch.randn(inputs, outputs) * 0.1), nn.Parameter(torch.zeros(outputs))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(x @ self.kernel + self.bias)


class OfLayers(Net):
    """A model that has its layers in a list, and registers their parameters only.

    Args:
        bias: The bias of the second layer.
    """

    def __init__(self, bias: float) -> None:
        super().__init__(torch.relu)
        del self.first, self.second, self.head
        self.layers = [Dense(64, 16, torch.relu), Dense(16, 16, torch.relu), Dense(16, 10, lambda x: x)]
        self.variables = nn.ParameterList([each for layer in self.layers for each in layer.parameters()])
        nn.init.constant_(self.layers[1].bias, bias)

    def forward(self, x: Tensor) -> Tensor:
        return functools.reduce(lambda x, layer: layer(x), self.layers, x.flatten(1))


@pytest.mark.parametrize(("bias", "expected"), [(0.0, []), (-20.0, [("dead-output", "layers[1]")])])
def test_layers_in_a_list_are_recorded_with_their_functions(
    tmp_path: Path, bias: float, expected: list[tuple[str, str]]
) -> None:
    """Layers whose parameters the model registers elsewhere are recorded, and one fault is one finding."""
    seed_everything(3, verbose=False)
    receipt, findings = fit(tmp_path, OfLayers(bias), *recorders())
    layers = ["layers[0]", "layers[1]", "layers[2]"]
    fired = {
        label: [name for name, each in about["modules"].items() if each["fired"]] for label, about in receipt.items()
    }
    assert fired["parameters"] == layers
    assert {*layers, "layers[0].relu", "layers[1].relu"} <= {*fired["activations"]} & {*fired["gradients"]}
    assert [(each["rule"], each["module"]) for each in findings if each["severity"] != "note"] == expected
