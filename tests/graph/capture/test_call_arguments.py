"""The inputs of a call, and its arguments that are not tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recorder.graph import capture_graph, diff
from tests.graph.nets import Net, X
from tests.graph.queries import only


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        pytest.param(torch.relu, {}, id="none"),
        pytest.param(lambda x: x.softmax(-1), {"dim": "-1"}, id="positional"),
        pytest.param(lambda x: torch.softmax(x, dim=0, dtype=torch.float64), {"dim": "0", "dtype": "torch.float64"},
                     id="keywords"),
        pytest.param(lambda x: x * 2.5, {"other": "2.5"}, id="number"),
        pytest.param(lambda x: x.view(4, 2), {"size": "(4, 2)"}, id="several sizes"),
        pytest.param(lambda x: x.view((4, 2)), {"size": "(4, 2)"}, id="sizes in a tuple"),
        pytest.param(lambda x: x[:, None, 1:3], {"index": ":, None, 1:3"}, id="index"),
        pytest.param(lambda x: x[..., ::2], {"index": "..., ::2"}, id="steps"),
        pytest.param(lambda x: x[x[:, 0].argmax()], {}, id="a computed index"),
        pytest.param(lambda x: torch.cat([x, x], 1), {"dim": "1"}, id="a list of tensors"),
        pytest.param(lambda x: F.conv1d(x[None], x[:, :, None].expand(-1, -1, 2)[:, :2], stride=2),
                     {"stride": "2"}, id="convolution"),
        pytest.param(lambda x: F.relu(x.clone(), inplace=True), {}, id="in place"),
    ],
)  # fmt: skip
def test_arguments_of_functions(function: Any, expected: dict[str, str]) -> None:
    """A function has its arguments by name, without tensors, without None, and without ``inplace``."""
    graph = capture_graph(Net(lambda _, x: function(x)), X)
    last = [node for node in graph.nodes if node.kind == "op"][-1]
    assert dict(last.arguments) == expected


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        pytest.param(nn.Linear(4, 2), (("in_features", "4"), ("out_features", "2"), ("bias", "True")), id="linear"),
        pytest.param(nn.Conv1d(2, 3, 2, stride=2),
                     (("", "2"), ("", "3"), ("kernel_size", "(2,)"), ("stride", "(2,)")), id="convolution"),
        pytest.param(nn.Dropout(0.3), (("p", "0.3"),), id="dropout"),
        pytest.param(nn.Sequential(nn.ReLU(inplace=True)), (), id="container"),
    ],
)  # fmt: skip
def test_arguments_of_modules(module: nn.Module, expected: tuple[tuple[str, str], ...]) -> None:
    """A module call has the settings that ``extra_repr`` shows."""
    graph = capture_graph(nn.Sequential(module), X)
    assert only(graph, "0").arguments == expected


class _Telling(nn.Module):
    def __init__(self, text: Any) -> None:
        super().__init__()
        self.text = text

    def extra_repr(self) -> str:
        return str(self.text() if callable(self.text) else self.text)

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f=<function g at 0x7f00, of h>, act=silu", (("f", "<function g, of h>"), ("act", "silu"))),
        ("sizes=[1, 2],\n  rest={'a': (3, 4)}", (("sizes", "[1, 2]"), ("rest", "{'a': (3, 4)}"))),
        ("x" * 300, (("", "x" * 200),)),
        (lambda: 1 // 0, ()),
    ],
)
def test_any_extra_repr(text: Any, expected: tuple[tuple[str, str], ...]) -> None:
    """Commas inside brackets separate nothing, addresses are left out, and an error leaves the arguments empty."""
    assert only(capture_graph(nn.Sequential(_Telling(text)), X), "0").arguments == expected


def test_inputs() -> None:
    """A call has all tensors that it takes, as often as they are passed, by keyword or not."""
    net = Net(lambda net, x: net.attention(x, x, value=x)[0], attention=nn.MultiheadAttention(4, 2))
    graph = capture_graph(net, X)
    assert [str(meta) for meta in only(graph, "attention").inputs] == ["2×4", "2×4", "2×4"]
    assert [str(meta) for meta in only(graph, "multi_head_attention_forward").inputs][:3] == ["2×4"] * 3


@pytest.mark.parametrize("stride", [2, 3])
def test_diff_and_hash_know_the_arguments(stride: int) -> None:
    """Two models that differ only in an argument, and not in a shape, have different hashes and a difference."""
    nets = [nn.Sequential(nn.Conv1d(2, 2, 1, padding=0, dilation=each)) for each in (1, stride)]
    one, other = (capture_graph(net, X[None].reshape(1, 2, 4)) for net in nets)
    assert one.structural_hash() != other.structural_hash()
    assert str(diff(one, other)).splitlines() == [
        f"~ 0: dilation: none -> ({stride},)",
        f"~ 0/conv1d: dilation: none -> {stride}",
    ]


def test_modules_that_live_for_one_call() -> None:
    """Modules that are created and freed in the forward pass have their own settings and numbers of parameters."""
    net = Net(lambda _, x: nn.Linear(3, 7, bias=False)(nn.Linear(4, 3)(x)))
    calls = capture_graph(net, X).module_calls()
    assert [(dict(node.arguments)["out_features"], node.parameters) for node in calls] == [("3", 15), ("7", 21)]
