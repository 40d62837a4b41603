"""The callbacks on models that call compiled functions."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from lightning.pytorch import Callback
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn import functional as F

from lightning_recorder import (
    ActivationRecorder,
    GradientRecorder,
    Graph,
    GraphRecorder,
    Outputs,
    ParameterRecorder,
    Schedule,
    TensorDumper,
)
from tests.callbacks.models import LEAVES, Classifier, digits, fit
from tests.callbacks.test_noninterference import assert_same

# torch reads the gradient of each tensor that is passed to compiled code.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

LOG = "lightning.pytorch.utilities.rank_zero"


def rounding(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """A backend whose code differs from eager code in the last bits, always in the same way."""

    def call(*args: Any) -> Any:
        return tuple(each * (1 + 2**-20) for each in graph.forward(*args))

    return call


def margin(logits: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(logits.log_softmax(-1) * 1.5, classes)


compiled_margin = torch.compile(margin, backend=rounding)


def accuracy(logits: Tensor, classes: Tensor) -> Tensor:
    return (logits.argmax(-1) == classes).float().mean()


MARGIN = f"margin ({Path(__file__).name}:{margin.__code__.co_firstlineno})"
ACCURACY = f"accuracy ({Path(__file__).name}:{accuracy.__code__.co_firstlineno})"


class Model(Classifier):
    """Compiles its loss on import, a method on its first call, and a metric in the validation step."""

    lazy: Any = None

    def encode(self, x: Tensor) -> Tensor:
        encoded: Tensor = self.encoder(x) * 2
        return encoded

    def forward(self, x: Tensor) -> Tensor:
        if self.lazy is None:
            self.lazy = torch.compile(self.encode, backend=rounding)
        return self.head(self.lazy(x))  # type: ignore[no-any-return]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = compiled_margin(self(batch[0]), batch[1])
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        torch.compile(accuracy, backend=rounding)(self(batch[0]), batch[1])


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Reset compilation before a test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """Return the log lines that name compiled code."""
    logger = logging.getLogger(LOG)
    with caplog.at_level(logging.INFO, logger=LOG):
        logger.addHandler(caplog.handler)
        yield lambda: [line for line in dict.fromkeys(caplog.messages) if "compiled code" in line]
        logger.removeHandler(caplog.handler)


def train(folder: Path, callbacks: list[Callback], **options: Any) -> tuple[Any, int]:
    """Train the model; return its losses and parameters and the number of compiled graphs."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(2)
    model = Model()
    fit(model, folder, callbacks, logger=False, **options)
    return [model.losses, dict(model.state_dict())], counters["stats"]["unique_graphs"]


def receipt(folder: Path) -> Any:
    return json.loads((folder / "recorder" / "receipt.json").read_text())


KINDS: dict[str, Any] = {
    "graph": GraphRecorder,
    "activations": ActivationRecorder,
    "gradients": GradientRecorder,
    "tensors": TensorDumper,
}


@pytest.mark.parametrize("groups", [[group] for group in KINDS] + [list(KINDS)], ids="-".join)
def test_functions_that_ran_eagerly_are_named_once(
    groups: list[str], logged: Callable[[], list[str]], tmp_path: Path
) -> None:
    """One log line and each receipt name the compiled functions that recorded steps ran eagerly."""
    quiet: dict[str, Any] = {"outputs": Outputs(plots=False)}
    options: dict[str, dict[str, Any]] = {"graph": {"formats": ()}, "tensors": {}}
    train(tmp_path, [KINDS[group](strict=True, **options.get(group, quiet)) for group in groups])
    (line,) = logged()
    assert line.startswith(f"Recorded steps run compiled code eagerly: Model.encode, {MARGIN}. The last bits")
    assert {group: about["ran_eagerly"] for group, about in receipt(tmp_path).items()} == {
        group: ["Model.encode", MARGIN] for group in groups
    }


def test_functions_of_an_evaluation_are_named_once(logged: Callable[[], list[str]], tmp_path: Path) -> None:
    """A function called only in validation has its own log line after the first recorded validation."""
    recorder = ActivationRecorder(schedule=Schedule(stages=["train", "validate"]), strict=True)
    train(tmp_path, [recorder], validation=digits(2), max_epochs=2)
    first, second = logged()
    assert f": Model.encode, {MARGIN}. " in first
    assert f": {ACCURACY}. " in second


def test_parameters_are_recorded_beside_compiled_code(logged: Callable[[], list[str]], tmp_path: Path) -> None:
    """ParameterRecorder adds no hooks to modules, so compiled code is used and nothing is logged."""
    bare, _ = train(tmp_path / "bare", [])
    recorded, _ = train(tmp_path, [ParameterRecorder(strict=True)])
    assert_same(recorded, bare)
    assert logged() == []


@pytest.mark.parametrize("group", KINDS)
def test_with_skip_functions_stay_compiled(group: str, logged: Callable[[], list[str]], tmp_path: Path) -> None:
    """With ``skip``, a run is bitwise the bare compiled run and compiles nothing more; with ``eager`` it differs."""
    bare, graphs = train(tmp_path / "bare", [])
    skipping, compiled = train(tmp_path / "skip", [KINDS[group](compiled="skip", strict=True)])
    assert_same(skipping, bare)
    assert compiled == graphs == 2
    assert logged() == []
    eager, _ = train(tmp_path / "eager", [KINDS[group](compiled="eager", strict=True)])
    assert eager[0][0] != bare[0][0]


def test_with_skip_the_receipt_says_what_was_compiled(tmp_path: Path) -> None:
    """A module called only by compiled code is not reported as bypassed."""
    train(tmp_path, [ActivationRecorder(compiled="skip", strict=True)])
    modules = receipt(tmp_path)["activations"]["modules"]
    assert [name for name in LEAVES if modules[name]["fired"]] == ["head"]
    assert modules["encoder.conv1"]["why"] == (
        f"compiled: no call of it outside of compiled code (Model.encode, {MARGIN}), which compiled='skip' keeps in use"
    )


def edges_into(graph: Graph, name: str) -> set[str]:
    """Return the names of the predecessors of the node with this name."""
    names = {node.id: node.name for node in graph.nodes}
    return {names[edge.source] for edge in graph.edges if names[edge.target] == name}


def test_with_skip_a_function_is_one_node(tmp_path: Path) -> None:
    """With ``skip``, each call of a compiled function is one node between its inputs and its consumers."""
    recorder = GraphRecorder(compiled="skip", strict=True)
    train(tmp_path, [recorder])
    assert recorder.graph is not None
    ops = [node.name for node in recorder.graph.nodes if node.kind in ("op", "backward")]
    assert ops == ["Model.encode", "linear", MARGIN, "detach", "clone", "backward"]
    assert {"batch[0]", "encoder.conv1.weight", "encoder.norm.bias"} <= edges_into(recorder.graph, "Model.encode")
    assert edges_into(recorder.graph, "linear") == {"Model.encode", "head.weight", "head.bias"}
    assert edges_into(recorder.graph, MARGIN) == {"linear", "batch[1]"}
    assert edges_into(recorder.graph, "backward") == {MARGIN}


class Failing(Model):
    """Raises an error in compiled code."""

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x.flatten())  # type: ignore[no-any-return]


def test_an_error_in_compiled_code_is_the_users(tmp_path: Path) -> None:
    """With ``skip``, an error in compiled code ends the run as without a recorder and leaves no mode or hook."""
    recorder = GraphRecorder(compiled="skip", strict=True)
    model = Failing()
    with pytest.raises(Exception, match=r"(?i)dimension|expected|got"):
        fit(model, tmp_path, [recorder, ActivationRecorder(compiled="skip", strict=True)], logger=False)
    assert torch.overrides._get_current_function_mode() is None
    assert not any(module._forward_hooks for module in model.modules())


def test_nothing_is_logged_where_nothing_is_compiled(logged: Callable[[], list[str]], tmp_path: Path) -> None:
    """A model without compiled code causes no log line and no names in its receipts."""
    fit(Classifier(), tmp_path, [kind(strict=True) for kind in KINDS.values()], logger=False)
    assert logged() == []
    assert {group: about["ran_eagerly"] for group, about in receipt(tmp_path).items()} == {
        "activations": [],
        "gradients": [],
    }
