"""The graph of a model that raises: the nodes before the error, the failed nodes, and their place."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_recorder import ForwardError
from lightning_recorder.graph import Graph, GraphCapture, capture_graph
from tests.graph.constructs.custom import Scale
from tests.graph.nets import Net, X, linear
from tests.graph.outline import outline, text


def failing(net: nn.Module, *inputs: Any) -> ForwardError:
    """Return the error of a model that raises while it is captured."""
    with pytest.raises(ForwardError) as caught:
        capture_graph(net, *inputs)
    return caught.value


def _mismatched(_: Any, x: Tensor) -> Tensor:
    return x.exp() @ torch.ones(3, 3)


def _deep() -> nn.Module:
    """Return a model that fails in the second layer of a submodule."""
    return nn.Sequential(linear(), nn.Sequential(nn.Tanh(), Net(_mismatched)), nn.ReLU())


# The error.


def test_error_names_the_module() -> None:
    """The message has the path and class of the innermost module that raised, and the original error."""
    error = failing(_deep(), X)
    assert str(error) == (
        "module '1.1' (Net) raised RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x4 and 3x3)"
    )
    assert isinstance(error.__cause__, RuntimeError)


def test_error_of_the_model_itself() -> None:
    """A model that raises outside of its submodules is named by its class."""
    error = failing(Net(lambda _, batch: batch["x"] / batch["scale"]), {"x": X})
    assert str(error) == "the model itself (Net) raised KeyError: 'scale'"


def test_error_is_pickled_with_its_graph() -> None:
    """The error keeps its message and graph through pickling, as when it is sent from another process."""
    error = failing(_deep(), X)
    twin = pickle.loads(pickle.dumps(error))
    assert (str(twin), twin.graph) == (str(error), error.graph)
    assert isinstance(twin, ForwardError)


def test_graph_of_a_failure_is_a_graph() -> None:
    """The graph keeps its failed nodes through JSON, and the root is marked as failed."""
    graph: Graph = failing(_deep(), X).graph
    twin = Graph.from_json(json.loads(json.dumps(graph.to_json())))
    assert twin == graph
    assert [(node.kind, node.name) for node in twin.nodes if node.failed] == [
        ("module", ""),
        ("module", "1"),
        ("module", "1.1"),
        ("op", "matmul"),
    ]


# The graph recorded until the error.


def test_function_that_fails() -> None:
    """The function that raised has its inputs and is marked like the calls around it; earlier nodes are not marked."""
    assert outline(failing(_deep(), X).graph) == text(
        """
        input
        0: Linear
          linear <- input
        1!: Sequential
          1.0: Tanh
            tanh <- linear
          1.1!: Net
            exp <- tanh
            ones
            matmul! <- exp, ones
        """
    )


def test_layer_that_fails() -> None:
    """A layer that was given the wrong shape is recorded with its parameters."""
    graph = failing(nn.Sequential(linear(), linear(3)), X).graph
    assert outline(graph, model_tensors=True) == text(
        """
        input
        0: Linear
          0.weight
          0.bias
          linear <- input, 0.weight, 0.bias
        1!: Linear
          1.weight
          1.bias
          linear#2! <- linear, 1.weight, 1.bias
        """
    )


def test_error_that_no_function_raised() -> None:
    """If the model's own code raises, no function is marked."""

    def forward(net: Any, x: Tensor) -> Tensor:
        raise ValueError(f"no {net.fc(x).shape}")

    assert outline(failing(nn.Sequential(Net(forward, fc=linear())), X).graph) == text(
        """
        input
        0!: Net
          0.fc: Linear
            linear <- input
        """
    )


def test_custom_function_that_fails() -> None:
    """An error inside an ``autograd.Function`` marks the node of that function, and nothing inside it is recorded."""
    net = nn.Sequential(Net(lambda _, x: Scale.apply(x.cos(), torch.ones(3))))
    assert outline(failing(net, X).graph) == text(
        """
        input
        0!: Net
          cos <- input
          ones
          Scale! <- cos, ones
        """
    )


def test_backward_pass_that_fails() -> None:
    """A backward pass that raised is marked."""

    def forward(net: Any, x: Tensor) -> None:
        loss = net.fc(x).exp().sum()
        loss.backward()
        loss.backward()

    error = failing(Net(forward, fc=linear()), X)
    assert "raised RuntimeError: Trying to backward through the graph a second time" in str(error)
    assert outline(error.graph) == text(
        """
        input
        fc: Linear
          linear <- input
        exp <- linear
        sum <- exp
        backward <- sum
        backward#2! <- sum
        """
    )


def test_gradient_that_fails() -> None:
    """A failed call of ``torch.autograd.grad`` in the model is marked."""

    def forward(_: Any, x: Tensor) -> Any:
        return torch.autograd.grad(x.exp().sum(), x)

    assert outline(failing(Net(forward), X).graph).splitlines()[-1] == "grad! <- sum, input"


# Errors that the model handles.


def _caught(dangerous: Callable[[Any, Tensor], object], kind: type[BaseException]) -> Callable[[Any, Tensor], Tensor]:
    def forward(net: Any, x: Tensor) -> Tensor:
        with suppress(kind):
            dangerous(net, x)
        return torch.cos(net.fc(x))

    return forward


def test_function_whose_error_is_caught() -> None:
    """A function that raised is not recorded if the same call continues."""
    graph = capture_graph(Net(_caught(_mismatched, RuntimeError), fc=linear()), X)
    assert outline(graph) == text(
        """
        input
        exp <- input
        ones
        fc: Linear
          linear <- input
        cos <- linear
        """
    )
    assert [node for node in graph.nodes if node.failed] == []


def test_call_whose_error_is_caught() -> None:
    """A call that raised stays with its failed contents, and the calls around it are not marked."""
    net = Net(_caught(lambda net, x: net.risky(x), RuntimeError), risky=nn.Sequential(Net(_mismatched)), fc=linear())
    assert outline(capture_graph(nn.Sequential(net), X)) == text(
        """
        input
        0: Net
          0.risky!: Sequential
            0.risky.0!: Net
              exp <- input
              ones
              matmul! <- exp, ones
          0.fc: Linear
            linear <- input
          cos <- linear
        """
    )


def _unrelated(_: Any, x: Tensor) -> Tensor:
    raise LookupError


@pytest.mark.parametrize("between", ["function", "call"])
def test_error_after_one_that_was_caught(between: str) -> None:
    """If the model later fails for another reason, an error that it handled before is not marked."""

    def forward(net: Any, x: Tensor) -> Any:
        with suppress(RuntimeError):
            x @ torch.ones(3, 3)
        return net.part(x) if between == "call" else _unrelated(net, x.exp())

    graph = failing(Net(forward, part=Net(_unrelated)), X).graph
    failed = [node.name for node in graph.nodes if node.failed]
    assert failed == (["", "part"] if between == "call" else [""])


def test_backward_pass_whose_error_is_caught() -> None:
    """A backward pass that raised stays as a node if the model continues."""

    def unlucky(net: Any, x: Tensor) -> None:
        loss = net.fc(x).exp().sum()
        loss.register_hook(lambda gradient: 1 / 0)
        loss.backward()

    graph = capture_graph(Net(_caught(unlucky, ZeroDivisionError), fc=linear()), X)
    assert outline(graph).splitlines()[-4:] == [
        "backward <- sum",
        "fc: Linear (call 2)",
        "  linear#2 <- input",
        "cos <- linear#2",
    ]
    assert [node for node in graph.nodes if node.failed] == []


# Code outside of the model.


def test_function_of_the_trainer_that_fails() -> None:
    """A failed computation of the trainer is not part of the graph."""
    trainer: dict[str, Any] = {"__name__": "lightning.pytorch.loops"}
    exec("def divide(loss): return loss @ loss", trainer)
    net = linear()
    recording = GraphCapture(net, X)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), recording:
        trainer["divide"](net(X))
    assert outline(recording.graph()) == "input\nlinear <- input"


# Interrupts.


def _interrupted(_: Any, x: Tensor) -> Tensor:
    x.exp()
    raise KeyboardInterrupt


def test_interrupt() -> None:
    """An interrupt propagates unchanged, and the graph holds the nodes recorded until then."""
    net = nn.Sequential(linear(), nn.Sequential(Net(_interrupted)), nn.ReLU())
    recording = GraphCapture(net, X)
    with pytest.raises(KeyboardInterrupt), recording:
        net(X)
    assert outline(recording.graph()) == text(
        """
        input
        0: Linear
          linear <- input
        1!: Sequential
          1.0!: Net
            exp <- linear
        """
    )


def test_interrupt_of_a_capture_by_name() -> None:
    """``capture_graph`` does not turn an interrupt into an error of its own."""
    with pytest.raises(KeyboardInterrupt):
        capture_graph(Net(_interrupted), X)
