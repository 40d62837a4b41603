"""The inputs of a call, and its arguments that are not tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recorder import draw
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
        pytest.param(lambda x: x.logsumexp(1), {"dim": "1"}, id="a dimension without a name"),
        pytest.param(lambda x: x.argmax(0, True), {"dim": "0", "keepdim": "True"}, id="two without a name"),
        pytest.param(lambda x: x.max(1)[0] * x.prod(1), {}, id="none at last"),
        pytest.param(lambda x: x.max(0, True)[0] + x.max(1, True)[0], {}, id="of several results"),
        pytest.param(lambda x: x.sum(1, True), {"dim": "1", "keepdim": "True"}, id="sum"),
        pytest.param(lambda x: x.sum(axis=1, keepdim=True), {"dim": "1", "keepdim": "True"}, id="another name"),
        pytest.param(lambda x: torch.mean(x, (0, 1), True), {"dim": "(0, 1)", "keepdim": "True"}, id="mean"),
        pytest.param(lambda x: x.nansum(1, True), {"dim": "1", "keepdim": "True"}, id="nansum"),
        pytest.param(lambda x: torch.amax(x, 1, True), {"dim": "1", "keepdim": "True"}, id="amax"),
        pytest.param(lambda x: torch.var(x, 1, False), {"dim": "1", "unbiased": "False"}, id="var"),
        pytest.param(lambda x: x.std(1, False, True), {"dim": "1", "unbiased": "False", "keepdim": "True"}, id="std"),
        pytest.param(lambda x: x.repeat_interleave(2, 1), {"repeats": "2", "dim": "1"}, id="repeat_interleave"),
        pytest.param(lambda x: x.to(torch.float64, False, True),
                     {"dtype": "torch.float64", "non_blocking": "False", "copy": "True"}, id="to"),
        pytest.param(lambda x: x.as_strided((2, 2), (1, 2), 0),
                     {"size": "(2, 2)", "stride": "(1, 2)", "storage_offset": "0"}, id="as_strided"),
        pytest.param(lambda x: x.permute(1, 0), {"dims": "(1, 0)"}, id="several dimensions"),
        pytest.param(lambda x: 2 ** x, {"other": "2"}, id="a reversed operator"),
        pytest.param(lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.0, True),
                     {"dropout_p": "0.0", "is_causal": "True"}, id="attention"),
        pytest.param(lambda x: F.leaky_relu_(x.clone(), -0.5), {"negative_slope": "-0.5"}, id="leaky_relu_"),
        pytest.param(lambda x: F.elu_(x.clone(), 0.5), {"alpha": "0.5"}, id="elu_"),
        pytest.param(lambda x: F.celu_(x.clone(), 0.5), {"alpha": "0.5"}, id="celu_"),
        pytest.param(lambda x: F.hardtanh_(x.clone(), -0.5, 0.5), {"min_val": "-0.5", "max_val": "0.5"},
                     id="hardtanh_"),
        pytest.param(lambda x: torch.threshold_(x.clone(), 0.1, 0.2), {"threshold": "0.1", "value": "0.2"},
                     id="threshold_"),
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
        f"~ 0/conv1d: dilation: (1,) -> ({stride},)",
    ]


def test_modules_that_live_for_one_call() -> None:
    """Modules that are created and freed in the forward pass have their own settings and numbers of parameters."""
    net = Net(lambda _, x: nn.Linear(3, 7, bias=False)(nn.Linear(4, 3)(x)))
    calls = capture_graph(net, X).module_calls()
    assert [(dict(node.arguments)["out_features"], node.parameters) for node in calls] == [("3", 15), ("7", 21)]


class _Leaky(nn.Module):
    def __init__(self, slope: float) -> None:
        super().__init__()
        self.linear, self.slope = nn.Linear(2, 2), slope

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu_(self.linear(x), self.slope)


@pytest.mark.parametrize(("other", "repeats"), [(-0.5, 1), (0.1, 4)])
def test_blocks_with_another_setting_are_not_folded(other: float, repeats: int) -> None:
    """Blocks fold only if the functions in them have equal settings."""
    net = nn.Sequential(*[_Leaky([0.1, other][number % 2]) for number in range(4)])
    view = draw(net, input_data=torch.ones(4, 2)).view
    assert max(node.repeats for node in view.nodes) == repeats
