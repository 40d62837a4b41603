"""The names of the arguments of torch's functions, however a call is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_recorder.graph import capture_graph, collapse, diff, fold_repeats
from lightning_recorder.graph.capture.function_calls import function_name
from tests.graph.nets import Net

X = torch.rand(4, 4)
_REDUCE = {"dim": 1, "keepdim": True}

# A function, the arguments that are not its defaults, and those that are, in the order in which torch takes them.
_TABLE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((name, _REDUCE, {}) for name in ("sum", "mean", "nansum", "amax", "amin", "median", "nanmedian", "mode", "prod")),
    *((name, _REDUCE, {}) for name in ("argmax", "argmin", "max", "min", "logsumexp", "all", "any", "nanmean")),
    *((name, {"dim": 1}, {"keepdim": False}) for name in ("sum", "mean", "median", "max", "argmax", "prod")),
    *((name, {"dim": 1, "unbiased": False, "keepdim": True}, {}) for name in ("std", "var")),
    *((name, {"dim": 0}, {"unbiased": True, "keepdim": False}) for name in ("std", "var")),
    *((name, {"unbiased": False}, {}) for name in ("std", "var")),
    *((name, {"dim": 0}, {}) for name in ("cumsum", "cumprod", "logcumsumexp", "cummax", "softmax", "log_softmax")),
    *((name, {"diagonal": 1}, {}) for name in ("triu", "tril")),
    *((name, {}, {"diagonal": 0}) for name in ("triu", "tril")),
    ("topk", {"k": 2, "dim": 0, "largest": False, "sorted": False}, {}),
    ("topk", {"k": 2}, {"dim": -1, "largest": True, "sorted": True}),
    ("kthvalue", {"k": 2, "dim": 0, "keepdim": True}, {}),
    ("sort", {"dim": 0, "descending": True}, {}),
    ("argsort", {"dim": 0, "descending": True}, {}),
    ("repeat_interleave", {"repeats": 2, "dim": 1}, {}),
    ("as_strided", {"size": (2, 2), "stride": (2, 1), "storage_offset": 1}, {}),
    ("transpose", {"dim0": 0, "dim1": 1}, {}),
    ("flatten", {}, {"start_dim": 0, "end_dim": -1}),
    ("unsqueeze", {"dim": 1}, {}),
    ("squeeze", {"dim": 1}, {}),
    ("narrow", {"dim": 1, "start": 1, "length": 2}, {}),
    ("select", {"dim": 1, "index": 2}, {}),
    ("chunk", {"chunks": 2, "dim": 1}, {}),
    ("chunk", {"chunks": 2}, {"dim": 0}),
    ("unbind", {"dim": 1}, {}),
    ("roll", {"shifts": 1, "dims": 0}, {}),
    ("flip", {"dims": (0, 1)}, {}),
    ("rot90", {"k": 2, "dims": (1, 0)}, {}),
    ("rot90", {}, {"k": 1, "dims": (0, 1)}),
    ("permute", {"dims": (1, 0)}, {}),
    ("reshape", {"shape": (2, 8)}, {}),
    ("movedim", {"source": 0, "destination": 1}, {}),
    ("diagonal", {"offset": 1}, {"dim1": 0, "dim2": 1}),
    ("diff", {"n": 2, "dim": 0}, {}),
    ("clamp", {"min": 0.25, "max": 0.5}, {}),
    ("clip", {"min": 0.25, "max": 0.5}, {}),
    ("nan_to_num", {"nan": 1.0, "posinf": 2.0, "neginf": 3.0}, {}),
    ("renorm", {"p": 2, "dim": 0, "maxnorm": 1.5}, {}),
    ("quantile", {"q": 0.5, "dim": 1, "keepdim": True}, {}),
    ("pow", {"exponent": 3}, {}),
    ("add", {"other": 3}, {}),
    ("mul", {"other": 2.5}, {}),
    ("remainder", {"other": 2}, {}),
    ("bernoulli", {"p": 0.25}, {}),
    ("logit", {"eps": 0.125}, {}),
]  # fmt: skip


def _forms(name: str, given: dict[str, Any]) -> Iterator[Callable[[Tensor], object]]:
    """Yield a call as a function and as a method, with each number of positional arguments."""
    names, values = list(given), list(given.values())
    for positional in range(len(given) + 1):
        args, named = values[:positional], {each: given[each] for each in names[positional:]}
        yield partial(_call, name, args, named, as_method=False)
        yield partial(_call, name, args, named, as_method=True)


def _call(name: str, args: list[Any], named: dict[str, Any], x: Tensor, *, as_method: bool) -> object:
    return getattr(x, name)(*args, **named) if as_method else getattr(torch, name)(x, *args, **named)


def _recorded(calls: list[Callable[[Tensor], object]], name: str) -> tuple[list[dict[str, str]], list[object]]:
    """Return the recorded arguments of some calls, and their results."""
    results: list[object] = []

    def forward(_: object, x: Tensor) -> Tensor:
        for call in calls:
            torch.manual_seed(0)
            results.append(call(x))
        return x * 1.5

    graph = capture_graph(Net(forward), X)
    # The last multiplication belongs to the model and not to the calls.
    nodes = [node for node in graph.nodes if node.kind == "op" and node.name == name]
    return [dict(node.arguments) for node in nodes][: len(calls)], results


@pytest.mark.parametrize(("name", "given", "defaults"), _TABLE)
def test_forms(name: str, given: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Every form of a call has the same names and values, and an explicit default is left out.

    Torch itself binds the names of the forms with keywords, and computes the same result in every form.
    """
    calls = [*_forms(name, given), *(_forms(name, {**given, **defaults}) if defaults else ())]
    expected = {key: repr(value) for key, value in given.items()}
    # Packages put functions of another name in the place of ``torch.select``, but not of the method.
    arguments, results = _recorded(calls, function_name(getattr(Tensor, name)))
    assert arguments == [expected] * len(calls)
    for each in results:
        torch.testing.assert_close(each, results[0], rtol=0, atol=0, equal_nan=True)


def test_number_of_forms() -> None:
    """The table has more than 300 forms of calls."""
    rows = [given | more for _, given, defaults in _TABLE for more in ({}, defaults) if more or not defaults]
    assert sum(len(list(_forms("", row))) for row in rows) > 300


_Q = torch.rand(1, 1, 4, 4)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x: F.scaled_dot_product_attention(_Q * x, _Q, _Q, None, 0.0, True), {"is_causal": "True"}),
        (lambda x: F.scaled_dot_product_attention(_Q * x, _Q, _Q, is_causal=True), {"is_causal": "True"}),
        (lambda x: x.to(torch.float64), {"dtype": "torch.float64"}),
        (lambda x: x.to(dtype=torch.float64), {"dtype": "torch.float64"}),
        (lambda x: x.to("cpu", torch.float64, False, True),
         {"device": "cpu", "dtype": "torch.float64", "copy": "True"}),
        (lambda x: x.to("cpu", copy=True), {"device": "cpu", "copy": "True"}),
        (lambda x: 2**x, {"other": "2"}),
        (lambda x: 2 - x, {"other": "2"}),
        (lambda x: torch.pow(2, x), {"input": "2"}),
        (lambda x: x + 2, {"other": "2"}),
        (lambda x: 2 + x, {"other": "2"}),
        (lambda x: x // 2, {"other": "2"}),
        (lambda x: torch.add(x, 2, alpha=3), {"other": "2", "alpha": "3"}),
        (lambda x: x.var(1, correction=0), {"dim": "1", "unbiased": "False"}),
        (lambda x: torch.std(x, dim=1, correction=1), {"dim": "1"}),
        (lambda x: torch.std(x, dim=1, correction=2), {"dim": "1", "correction": "2"}),
        (lambda x: x.sum(axis=1, keepdims=True), {"dim": "1", "keepdim": "True"}),
        (lambda x: x.sum((0, 1)), {"dim": "(0, 1)"}),
        (lambda x: x.sum((1,)), {"dim": "1"}),
        (lambda x: torch.normal(x, 2), {"std": "2.0"}),
        (lambda x: x.expand(2, 4, 4), {"size": "(2, 4, 4)"}),
        (lambda x: x.expand((2, 4, 4)), {"size": "(2, 4, 4)"}),
        (lambda x: x.repeat(2, 1), {"repeats": "(2, 1)"}),
        (lambda x: x.permute(1, 0), {"dims": "(1, 0)"}),
        (lambda x: x.reshape(2, 8), {"shape": "(2, 8)"}),
        (lambda x: x.flip(0, 1), {"dims": "(0, 1)"}),
        (lambda x: x.view(-1), {"size": "(-1,)"}),
        (lambda x: x.view(torch.int32), {"dtype": "torch.int32"}),
        (lambda x: x.new_zeros(2, 3), {"size": "(2, 3)"}),
        (lambda x: F.conv2d(x[None, None], _Q, None, 2, 2), {"stride": "(2, 2)", "padding": "(2, 2)"}),
        (lambda x: F.conv2d(x[None, None], _Q, stride=(2, 2), padding=2), {"stride": "(2, 2)", "padding": "(2, 2)"}),
        (lambda x: F.conv2d(x[None, None], _Q, None, 1, 0, (1, 1), 1), {}),
        (lambda x: F.conv2d(x[None, None], _Q[..., :3, :3], None, 1, "same"), {"padding": "'same'"}),
        (lambda x: torch.einsum("ij,jk->ik", x, x), {"equation": "'ij,jk->ik'"}),
        (lambda x: torch.scatter_add(x, 1, x.long(), x), {"dim": "1"}),
        (lambda x: torch.cat([x, x]), {}),
        (lambda x: torch.cat([x, x], 0), {}),
        (lambda x: torch.stack((x, x), dim=2), {"dim": "2"}),
        (lambda x: torch.where(x > 0, x, 2.0), {"other": "2.0"}),
        (lambda x: torch.lerp(x, x, 0.25), {"weight": "0.25"}),
        (lambda x: torch.addmm(x, x, x, beta=2), {"beta": "2"}),
        (lambda x: torch.fft.fft(x, 4, 1, "ortho"), {"n": "4", "dim": "1", "norm": "'ortho'"}),
        (lambda x: torch.linalg.vector_norm(x, 1, 0), {"ord": "1", "dim": "0"}),
        (lambda x: x.norm(1, 0, True), {"p": "1", "dim": "0", "keepdim": "True"}),
        (lambda x: F.gelu(x, approximate="tanh"), {"approximate": "'tanh'"}),
        (lambda x: F.leaky_relu_(x.clone(), -0.5), {"negative_slope": "-0.5"}),
        (lambda x: F.elu_(x.clone(), 0.5), {"alpha": "0.5"}),
        (lambda x: F.celu_(x.clone(), 0.5), {"alpha": "0.5"}),
        (lambda x: F.hardtanh_(x.clone(), -0.5, 0.5), {"min_val": "-0.5", "max_val": "0.5"}),
        (lambda x: torch.threshold_(x.clone(), 0.1, -0.5), {"threshold": "0.1", "value": "-0.5"}),
        (lambda x: x.sum(dim=None), {}),
        (lambda x: x.max(dim=1)[0], {"dim": "1"}),
        (lambda x: torch.max(x, 1)[0], {"dim": "1"}),
        (lambda x: torch.max(x, x), {}),
        (lambda x: x.clone().add_(2, alpha=3), {"other": "2", "alpha": "3"}),
        (lambda x: x.clone().clamp_(0.25), {"min": "0.25"}),
        (lambda x: x**2, {"exponent": "2"}),
        (lambda x: x.pow(exponent=2), {"exponent": "2"}),
        (lambda x: x.reshape(torch.zeros(2, 8).shape), {"shape": "(2, 8)"}),
        (lambda x: x.to(torch.device("cpu"), torch.float64), {"device": "cpu", "dtype": "torch.float64"}),
        (lambda x: x.to(float), {"dtype": "torch.float64"}),
        (lambda x: x.sum(np.int64(1)), {"dim": "1"}),
        (lambda x: F.relu(x, False), {}),
        (lambda x: F.relu(x, inplace=False), {}),
        (lambda x: F.leaky_relu(x, 0.01), {}),
        (lambda x: F.leaky_relu(x, negative_slope=0.5), {"negative_slope": "0.5"}),
        (lambda x: F.softmax(x, 1), {"dim": "1"}),
        (lambda x: F.softmax(x, dim=1, dtype=None), {"dim": "1"}),
        (lambda x: F.layer_norm(x, [4], None, None, 1e-5), {"normalized_shape": "(4,)"}),
        (lambda x: F.layer_norm(x, (4,), eps=0.5), {"normalized_shape": "(4,)", "eps": "0.5"}),
        (lambda x: F.mse_loss(x, X, reduction="mean"), {}),
        (lambda x: F.cross_entropy(x, X, None, None, -100, None, "sum"), {"reduction": "'sum'"}),
        (lambda x: F.max_pool2d(x[None], 2), {"kernel_size": "(2, 2)"}),
        (lambda x: F.max_pool2d(x[None], (2, 2), ceil_mode=False), {"kernel_size": "(2, 2)"}),
        (lambda x: F.avg_pool2d(x[None], 2, 1), {"kernel_size": "(2, 2)", "stride": "(1, 1)"}),
        (lambda x: F.pad(x, (1, 1)), {"pad": "(1, 1)"}),
        (lambda x: F.pad(x, [1, 1], "constant", None), {"pad": "(1, 1)"}),
        (lambda x: F.normalize(x, 2, 1), {}),
        (lambda x: F.normalize(x, p=1, dim=0), {"p": "1", "dim": "0"}),
        (lambda x: F.dropout(x, training=True), {}),
        (lambda x: torch.split(x, 2)[0], {"split_size": "2"}),
        (lambda x: x.split(2)[0], {"split_size": "2"}),
        (lambda x: torch.split(x, [1, 3], dim=1)[0], {"split_size": "(1, 3)", "dim": "1"}),
        (lambda x: x.split([1, 3], 1)[0], {"split_size": "(1, 3)", "dim": "1"}),
    ],
)  # fmt: skip
def test_special_forms(call: Callable[[Tensor], Tensor], expected: dict[str, str]) -> None:
    """Overloads, operators, names of NumPy, and one number for several get the names of the schema that fits."""
    graph = capture_graph(Net(lambda _, x: call(x)), X)
    assert dict([node for node in graph.nodes if node.kind == "op"][-1].arguments) == expected


def test_lstm_and_assignment() -> None:
    """The settings of an LSTM are not shifted, and an assignment has its index and its value."""

    def forward(net: Any, x: Tensor) -> Tensor:
        y: Tensor = net.lstm(x)[0].clone()
        y[:, 1:] = 3.0
        return y

    graph = capture_graph(Net(forward, lstm=torch.nn.LSTM(4, 4, 2, dropout=0.25)), X)
    found = {node.name: dict(node.arguments) for node in graph.nodes if node.kind == "op"}
    assert found["lstm"] | {"train": ""} == {
        "has_biases": "True", "num_layers": "2", "dropout": "0.25", "train": "", "bidirectional": "False",
        "batch_first": "False",
    }  # fmt: skip
    assert found["setitem"] == {"index": ":, 1:", "value": "3.0"}


class _Block(torch.nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer(x))


def _repeats(*calls: Callable[[Tensor], Tensor]) -> list[int]:
    graph = capture_graph(torch.nn.Sequential(*map(_Block, calls)), X)
    view = fold_repeats(collapse(graph, leaves=False))
    return [node.repeats for node in view.nodes if node.repeats > 1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: F.leaky_relu_(x, 0.1), lambda x: F.leaky_relu_(x, -0.5)),
        (lambda x: F.elu_(x, 0.1), lambda x: F.elu_(x, 0.5)),
        (lambda x: F.celu_(x, 0.1), lambda x: F.celu_(x, 0.5)),
        (lambda x: F.hardtanh_(x, -0.1, 1.0), lambda x: F.hardtanh_(x, -0.5, 1.0)),
        (lambda x: torch.threshold_(x, 0.1, 0.0), lambda x: torch.threshold_(x, -0.5, 0.0)),
        (F.leaky_relu, lambda x: F.leaky_relu(x, 0.1)),
        (lambda x: x.reshape(2, 8).reshape(4, 4), lambda x: x.reshape(8, 2).reshape(4, 4)),
        (lambda x: torch.cdist(x, x, 1.0), lambda x: torch.cdist(x, x, 2.0)),
        (lambda x: F.dropout(x, 0.0) * x.std(1, True), lambda x: F.dropout(x, 0.0) * x.std(1, False)),
    ],
)
def test_blocks_that_differ_are_not_folded(one: Any, other: Any) -> None:
    """Blocks with different settings of a function are drawn apart, and those with the same settings together."""
    assert 4 not in _repeats(one, other, one, other)
    assert _repeats(one, one, one, one) == [4]


def test_forms_are_folded_and_have_no_difference() -> None:
    """Blocks that compute the same are folded however they are written, and ``diff`` reports no change."""
    one, other = (lambda x: x.cumsum(1)), (lambda x: torch.cumsum(input=x, dim=1))
    assert _repeats(one, other, one, other) == [4]
    positional = capture_graph(Net(lambda _, x: x.sum(1, True).flatten(0)), X)
    named = capture_graph(Net(lambda _, x: torch.flatten(torch.sum(x, dim=1, keepdim=True))), X)
    assert [node.arguments for node in positional.nodes] == [node.arguments for node in named.nodes]
    assert not [line for line in str(diff(positional, named)).splitlines() if line.startswith("~")]
