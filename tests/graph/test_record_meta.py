"""Recording on the meta device: the same graph without memory, and an unchanged model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_recorder import ArgumentError, ForwardError
from lightning_recorder.graph import Graph, record
from tests import forks
from tests.graph.nets import Net, X, linear
from tests.graph.outline import outline

TOKENS = torch.tensor([[1, 2, 3]])
PICTURES = torch.linspace(0.0, 1.0, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


class Cube(torch.autograd.Function):
    """A custom function."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.pow(3)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)
    )


def _tied() -> nn.Module:
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    net[1].weight = net[0].weight
    return net


def _shared() -> nn.Module:
    layer = linear()
    return nn.Sequential(layer, nn.ReLU(), layer)


def _gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1)
    )


def _bert() -> nn.Module:
    return hf.BertForMaskedLM(
        hf.BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
    )


def _own_function() -> nn.Module:
    return Net(lambda net, x: Cube.apply(net.fc(x)), fc=linear())  # type: ignore[no-untyped-call]  # torch's


def _unregistered() -> nn.Module:
    net = Net(lambda net, x: net.parts[1](net.parts[0](x)))
    net.parts = [linear(), nn.BatchNorm1d(4)]  # type: ignore[assignment]  # deliberately unregistered
    return net


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    given: Any = X


CASES = {
    "MLP": Case(lambda: nn.Sequential(linear(), nn.ReLU(), nn.Dropout(), linear())),
    "conv, batch norm": Case(_conv, PICTURES),
    "conv, batch norm, eval": Case(lambda: _conv().eval(), PICTURES),
    "LSTM": Case(lambda: nn.LSTM(4, 3, num_layers=2, batch_first=True), X[None]),
    "GRU cell in a loop": Case(lambda: Net(lambda net, x: net.cell(x, net.cell(x)), cell=nn.GRUCell(4, 4))),
    "attention": Case(lambda: Net(lambda net, x: net.part(x, x, x)[0], part=nn.MultiheadAttention(4, 2)), X[None]),
    "transformer": Case(lambda: nn.TransformerEncoderLayer(4, 2, 8), X[None]),
    "transformer, fused": Case(lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval(), X[None]),
    "tied weights": Case(_tied, TOKENS),
    "shared module": Case(_shared),
    "in-place residual": Case(lambda: Net(lambda net, x: torch.relu_(x + net.fc(x)), fc=linear())),
    "group norm": Case(lambda: nn.Sequential(nn.Conv1d(2, 4, 1), nn.GroupNorm(2, 4), nn.GELU()), X[None]),
    "spectral norm": Case(lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(linear()))),
    "module in a list": Case(_unregistered),
    "made inside": Case(lambda: Net(lambda net, x: net.fc(x) + torch.arange(4) + torch.tensor([1.0]), fc=linear())),
    "gradient inside": Case(
        lambda: Net(lambda net, x: torch.autograd.grad(net.fc(x).sum(), net.fc.weight)[0], fc=linear())
    ),
    "checkpoint": Case(lambda: Net(lambda net, x: checkpoint(net.fc, x, use_reentrant=False), fc=linear())),
    "vmap": Case(lambda: Net(lambda net, x: torch.vmap(net.fc)(x), fc=linear())),
    "own function": Case(_own_function),
    "GPT-2": Case(_gpt2, {"input_ids": TOKENS, "labels": TOKENS.clone()}),
    "BERT": Case(_bert, {"input_ids": TOKENS}),
}


def _with_one_name_for_views(graph: Graph) -> Graph:
    """Return the graph with a single name for views, whose autograd types depend on whether tensors have values."""
    names = {"ReshapeAliasBackward0": "ViewBackward0"}
    return replace(
        graph,
        nodes=tuple(replace(node, autograd=tuple(names.get(n, n) for n in node.autograd)) for node in graph.nodes),
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_graph_is_that_of_the_real_run(case: Case) -> None:
    """Names, calls, shapes, dtypes, edges and autograd types are those of a run with values."""
    torch.manual_seed(0)
    net = case.make()
    real, fake = record(net, input_data=case.given), record(net, input_data=case.given, device="meta")
    assert _with_one_name_for_views(fake) == _with_one_name_for_views(real)
    assert [(edge, edge.multiplicity, edge.tensor) for edge in fake.edges] == [
        (edge, edge.multiplicity, edge.tensor) for edge in real.edges
    ]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_model_is_left_as_it_is(case: Case) -> None:
    """All parameters and buffers are the same objects with the same values, on the same device, and the model runs."""
    net = case.make()
    tensors = {**dict(net.named_parameters(remove_duplicate=False)), **dict(net.named_buffers(remove_duplicate=False))}
    values = {name: each.detach().clone() for name, each in tensors.items()}
    record(net, input_data=case.given, device="meta")
    after = {**dict(net.named_parameters(remove_duplicate=False)), **dict(net.named_buffers(remove_duplicate=False))}
    assert after.keys() == tensors.keys()
    assert [name for name in tensors if after[name] is not tensors[name]] == []
    assert [name for name in values if not torch.equal(values[name], tensors[name])] == []
    assert {each.device.type for each in tensors.values()} <= {"cpu"}
    net(**case.given) if isinstance(case.given, dict) else net(case.given)


def test_nothing_is_computed() -> None:
    """No value of the input or the parameters is read: an index that is out of range is no error."""
    net = Net(lambda net, x: net.table(x), table=nn.Embedding(5, 3))
    outside = torch.tensor([7])  # the table has five rows
    with pytest.raises(ForwardError, match="out of range"):
        record(net, input_data=outside)
    assert outline(record(net, input_data=outside, device="meta")) == "input\ntable: Embedding\n  embedding <- input"


# Memory.

_PEAK = """
import resource
import torch
from torch import nn
from lightning_recorder.graph import record

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024  # MiB

record(nn.Linear(4, 4), input_shapes=(1, 4))
record(nn.Linear(4, 4), input_shapes=(1, 4), device="meta")
"""

_HUGE = """
with torch.device("meta"):
    net = nn.Sequential(*(nn.Linear(100_000, 100_000) for _ in range(10)))
before = peak()
graphs = [record(net, input_shapes=(10_000, 100_000), device=device) for device in (None, "meta")]
print(peak() - before, graphs[0].parameters, graphs[0] == graphs[1], graphs[0].nodes[-1].outputs[0])
"""

_LARGE = """
net = nn.Sequential(nn.Linear(7_000, 7_000))
before = peak()
record(net, input_shapes=(50_000, 7_000), device="meta")
fake = peak() - before
record(net, input_shapes=(1, 7_000))
print(fake, peak() - before)
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Return what both scripts print in a separate process."""
    if sys.platform != "linux":
        pytest.skip("the unit of ru_maxrss is that of Linux")
    printed = forks.output_of("-c", _PEAK + _HUGE + _LARGE, folder=tmp_path_factory.mktemp("memory"))
    return [line.split() for line in printed.splitlines()]


def test_a_model_of_any_size_takes_no_memory(measured: list[list[str]]) -> None:
    """10¹¹ parameters and an input of 4 GB, on the meta device, take less than 16 MiB."""
    grown, parameters, same, shape = measured[0]
    assert (int(parameters), same, shape) == (10 * (100_000**2 + 100_000), "True", "10000×100000")
    assert int(grown) < 16


def test_parameters_are_not_copied(measured: list[list[str]]) -> None:
    """A model of 49 M parameters, 187 MiB, is recorded with less than 16 MiB more, with values and without."""
    fake, real = map(int, measured[1])
    assert fake < 16
    assert real < 16


# Unsupported models.

_UNKNOWN: dict[str, Callable[[Any, Tensor], Any]] = {
    "branch": lambda net, x: net.fc(x) if x.sum() > 0 else x,
    "item": lambda net, x: net.fc(x) * x.sum().item(),
    "mask": lambda net, x: net.fc(x)[x > 0],
    "nonzero": lambda net, x: net.fc(x).nonzero(),
    "list": lambda net, x: net.fc(x).tolist(),
    "loop": lambda net, x: [net.fc(x) for _ in range(int(x.max()))],
}


@pytest.mark.parametrize("forward", _UNKNOWN.values(), ids=_UNKNOWN)
def test_flow_that_depends_on_values(forward: Callable[[Any, Tensor], Any]) -> None:
    """A model that reads a value fails with the reason, a remedy, and the graph until then."""
    net = nn.Sequential(nn.ReLU(), Net(forward, fc=linear()))
    message = r"^module '1' \(Net\) raised .*; the model reads the values .* device='meta' .*: record without it$"
    with pytest.raises(ForwardError, match=message) as caught:
        record(net, input_data=X, device="meta")
    assert outline(caught.value.graph).startswith("input\n0: ReLU\n  relu <- input\n1!: Net")
    assert caught.value.__cause__ is not None
    record(net, input_data=X)


def test_lazy_modules_need_a_run() -> None:
    """The error for a lazy module names its uninitialized parameter, and the module stays lazy."""
    net = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ArgumentError, match=r"device='meta' needs the shape of '0\.weight'"):
        record(net, input_data=X, device="meta")
    assert type(net[0]) is nn.LazyLinear
    record(net, input_data=X)
    assert record(net, input_data=X, device="meta") == record(net, input_data=X)


def test_inputs_on_the_meta_device() -> None:
    """A model and inputs that are on the meta device are recorded as such."""
    graph = record(nn.Linear(4, 3, device="meta"), input_data=X.to("meta"), device="meta")
    assert [node.outputs[0].device for node in graph.nodes[1:]] == ["meta"] * 5
