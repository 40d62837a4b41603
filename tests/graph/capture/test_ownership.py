"""Each node of torch's backward graph belongs to the function that created it, compared with autograd's own graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from hypothesis import given
from torch import Tensor, nn
from torch.autograd.graph import Node as AutogradNode
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lightning_recorder.graph import Graph, GraphCapture, Node
from lightning_recorder.internals.autograd import sequence_number, sequence_number_of
from tests.graph.constructs.custom import Differentiating, Foreign, Moved, Outer, Scale, Two, WithModule, Written
from tests.graph.nets import Net, X, linear, scaled
from tests.graph.queries import sources_of
from tests.graph.random_nets import Block, Program, programs

TOKENS = torch.tensor([[5, 3, 9, 1], [2, 7, 7, 4]])
ACCUMULATE = "torch::autograd::AccumulateGrad"

# The slow reference: autograd's graph, traversed from the loss.


def autograd_nodes(loss: Tensor) -> list[AutogradNode]:
    """Return all nodes behind a loss, each once; the list keeps them alive, so that each is one object."""
    found: dict[int, AutogradNode] = {}
    todo = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and id(node) not in found:
            found[id(node)] = node
            todo.extend(before for before, _ in node.next_functions)
    return list(found.values())


def types_of(nodes: list[AutogradNode]) -> Counter[str]:
    """Return the number of nodes of each type, without those of leaves."""
    return Counter(node.name() for node in nodes if node.name() != ACCUMULATE)


class Calls(TorchFunctionMode):
    """Records, for each function in the order of time, the numbers of the autograd nodes created while it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[range] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = sequence_number()
        result = func(*args, **(kwargs or {}))
        self.numbers.append(range(start, sequence_number()))
        return result


def types_by_call(nodes: list[AutogradNode], calls: Calls) -> list[Counter[str]]:
    """Return the types of the nodes that each function created, in the order of time; omit functions without any."""
    by_number = {sequence_number_of(node): node.name() for node in nodes if node.name() != ACCUMULATE}
    found = [Counter(by_number[number] for number in numbers if number in by_number) for numbers in calls.numbers]
    return [each for each in found if each]


# The recorded graph.


def by_gradient(graph: Graph) -> list[Node]:
    """Return the nodes and parameters that the gradient of the only backward pass reaches, in the order of time."""
    (backward,) = (node.id for node in graph.nodes if (node.kind, node.name) == ("backward", "backward"))
    found: set[int] = set()
    todo = [backward]
    while todo:
        target = todo.pop()
        sources = {edge.source for edge in graph.edges if edge.target == target} - found
        # A call without any function returns the tensor that it took.
        new = {
            each
            for each in sources
            if graph[each].autograd or graph[each].kind == "parameter" or graph[each].name == "identity"
        }
        found |= new
        todo.extend(new)
    return [graph[each] for each in sorted(found)]


NOTHING: Mapping[str, Any] = MappingProxyType({})


class Case(NamedTuple):
    """A net that is called with a batch, and its autograd nodes that the loss does not use.

    Args:
        net: A function that creates the net.
        batch: Its arguments.
        unused: The number of autograd nodes, by type, that its functions created but the loss does not use: those of
            unused results, and those of views that torch created again after a write to the base.
        keywords: Its keyword arguments. If there are any, the net returns the loss itself.
    """

    net: Callable[[], nn.Module]
    batch: tuple[Any, ...] = (X,)
    unused: Mapping[str, int] = NOTHING
    keywords: Mapping[str, Tensor] = NOTHING


def _assigned(net: Any, x: Tensor) -> Any:
    hidden, out = net.fc(x), torch.zeros(2, 4)
    out[:, 0] = hidden[:, 1]
    out[:, 1:3] = hidden[:, 2:]
    out[0] += hidden[0]
    return out


def _written_later(net: Any, x: Tensor) -> Any:
    hidden = net.fc(x)
    turned, row = hidden.t(), hidden[0]
    hidden.mul_(2)
    row.add_(net.other(x)[1])
    return turned


def _split(net: Any, x: Tensor) -> Any:
    query, key, value = net.fc(x).split([1, 1, 2], dim=1)
    one, other = net.other(x).unbind(0)
    best = net.fc(x).max(1)
    return query * key * value + (one * other).sum() + best.values[:, None]


def _penalty(net: Any, x: Tensor) -> Any:
    x = x.clone().requires_grad_()
    score = net.other(net.fc(x).tanh()).sum()
    (slope,) = torch.autograd.grad(score, x, create_graph=True)
    return score + (slope.norm(2, dim=1) - 1).square().mean()


def _jacobian(net: Any, x: Tensor) -> Any:
    pair: Any = torch.func.jvp(lambda y: net.fc(y).tanh(), (x,), (torch.ones_like(x),))
    values, slopes = pair
    return values + slopes


def _two_layers(forward: Any) -> nn.Module:
    return Net(forward, fc=linear(), other=linear())


def _language_model(kind: str) -> nn.Module:
    if kind == "gpt2":
        return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=2, n_head=2))
    config = hf.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    return hf.BertForMaskedLM(config)


WORDS = {"input_ids": TOKENS, "labels": TOKENS.clone()}

# Functions of torch only, so that the nodes that each one created are known by the time at which it ran.
PLAIN = {
    "MLP": Case(lambda: nn.Sequential(linear(), nn.ReLU(), linear())),
    "convolution and batch norm": Case(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        (torch.linspace(-1, 1, 384).reshape(2, 3, 8, 8),),
    ),
    "LSTM": Case(
        lambda: Net(lambda net, x: torch.cat([part.flatten() for part in _flat(net.lstm(x))]), lstm=nn.LSTM(4, 3, 2)),
        (X[None],),
    ),
    "attention": Case(
        lambda: Net(lambda net, x: net.attention(x, x, x)[0], attention=nn.MultiheadAttention(4, 2)),
        (X[None],),
        # The weights, averaged over the heads.
        {"ViewBackward0": 1, "MeanBackward1": 1},
    ),
    "transformer layer": Case(lambda: nn.TransformerEncoderLayer(4, 2, 8), (X[None],)),
    "residual, in place": Case(lambda: _two_layers(lambda net, x: F.relu_(net.fc(x).add_(1) + net.other(x)))),
    "split and unbind": Case(lambda: _two_layers(_split)),
    "checkpoint": Case(
        lambda: _two_layers(lambda net, x: checkpoint(net.other, net.fc(x).relu(), use_reentrant=False))
    ),
    "gradient penalty": Case(lambda: _two_layers(_penalty)),
    "embedding": Case(lambda: nn.Sequential(nn.Embedding(10, 4), linear()), (TOKENS,)),
    "tied weights": Case(lambda: Net(lambda net, x: net.fc(net.fc(x)), fc=linear())),
    "detached branch": Case(lambda: _two_layers(lambda net, x: net.fc(x).detach() * net.other(x))),
    "weight norm": Case(lambda: parametrizations.weight_norm(linear())),
    "complex": Case(lambda: Net(lambda net, x: torch.view_as_real(torch.fft.fft(net.fc(x)) * 1j), fc=linear())),
    "GPT-2": Case(lambda: _language_model("gpt2"), (), keywords=WORDS),
    "BERT": Case(lambda: _language_model("bert"), (), keywords=WORDS),
}

CASES = {
    **PLAIN,
    "index assignment": Case(
        lambda: Net(_assigned, fc=linear()), unused={"SelectBackward0": 1, "AsStridedBackward0": 1}
    ),
    "views written later": Case(lambda: _two_layers(_written_later), unused={"AsStridedBackward0": 1}),
    "custom, with a context": Case(lambda: scaled(lambda net, x: Scale.apply(net.fc(x), net.scale), fc=linear())),
    "custom, with setup_context": Case(lambda: scaled(lambda net, x: Moved.apply(net.fc(x), net.scale), fc=linear())),
    "custom, two results": Case(lambda: scaled(lambda net, x: sum(Two.apply(net.fc(x))) * net.scale, fc=linear())),
    "custom, one of two results": Case(lambda: Net(lambda net, x: Two.apply(net.fc(x))[1], fc=linear())),
    "custom, in NumPy": Case(lambda: Net(lambda net, x: Foreign.apply(Foreign.apply(net.fc(x))), fc=linear())),
    "custom, nested": Case(lambda: Net(lambda net, x: Outer.apply(Outer.apply(net.fc(x))), fc=linear())),
    "custom, with a graph of its own": Case(
        lambda: Net(lambda net, x: Differentiating.apply(net.fc(x)), fc=linear()), unused={"InnerBackward": 1}
    ),
    "custom, in place": Case(lambda: Net(lambda net, x: (y := net.fc(x), Written.apply(y), y.tanh())[2], fc=linear())),
    "custom, calling a module": Case(lambda: _two_layers(lambda net, x: WithModule.apply(net.fc(x), nn.Tanh()))),
    "custom, in a checkpoint": Case(
        lambda: scaled(
            lambda net, x: checkpoint(lambda y: Scale.apply(y, net.scale).tanh(), net.fc(x), use_reentrant=False),
            fc=linear(),
        )
    ),
    "vmap": Case(lambda: Net(lambda net, x: torch.func.vmap(lambda row: net.fc(row).tanh())(x), fc=linear())),
    "gradient transform": Case(
        lambda: Net(lambda net, x: net.fc(x) + torch.func.grad(lambda y: net.fc(y).tanh().sum())(x), fc=linear()),
        # The gradient of a sum does not depend on the sum.
        unused={"SumBackward0": 1},
    ),
    "forward-mode gradient": Case(lambda: Net(_jacobian, fc=linear())),
    "scripted": Case(lambda: Net(lambda net, x: net.part(x.exp()).cos(), part=torch.jit.script(linear()))),
    "fused, in eval mode": Case(
        lambda: Net(lambda net, x: net.layer(x), layer=nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)).eval(),
        (X[None],),
    ),
}


def _flat(results: Any) -> list[Tensor]:
    out, (hidden, cell) = results
    return [out, hidden, cell]


class Run(NamedTuple):
    graph: Graph
    behind: list[AutogradNode]
    calls: Calls
    net: nn.Module


def run(net: nn.Module, *batch: Any, **keywords: Any) -> Run:
    """Run a forward and backward pass in a capture, and return its graph with that of autograd."""
    torch.manual_seed(0)
    calls = Calls()
    with calls, GraphCapture(net, [*batch, keywords]) as recording:
        out = net(*batch, **keywords)
        loss = out.loss if keywords else out.square().sum()
        loss.backward()
    return Run(recording.graph(), autograd_nodes(loss), calls, net)


def run_of(case: Case) -> Run:
    """Run a case in the same way."""
    torch.manual_seed(0)
    return run(case.net(), *case.batch, **case.keywords)


def accumulating(behind: list[AutogradNode], net: nn.Module) -> set[str]:
    """Return the names of the parameters that receive a gradient of the loss."""
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    leaves = [getattr(node, "variable", None) for node in behind]
    return {names[id(leaf)] for leaf in leaves if id(leaf) in names}


pytestmark = [
    # Warnings that torch raises about its own features, which are used deliberately.
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_node_belongs_to_one_op(case: Case) -> None:
    """The nodes behind the loss are those of the ops on the path of the gradient, each of them once."""
    ran = run_of(case)
    owned = Counter(name for node in by_gradient(ran.graph) for name in node.autograd)
    expected = types_of(ran.behind)
    assert len(expected) > 1
    assert owned == expected + Counter(case.unused)


@pytest.mark.parametrize("case", PLAIN.values(), ids=PLAIN)
def test_each_op_has_the_nodes_that_it_made(case: Case) -> None:
    """The nodes of each op, in the order of time, are those that autograd created while the function ran."""
    ran = run_of(case)
    expected = types_by_call(ran.behind, ran.calls)
    assert sum(expected, Counter()) == types_of(ran.behind)
    owned = [Counter(node.autograd) for node in by_gradient(ran.graph) if node.autograd]
    if case.unused:
        (more,) = (at for at, (one, other) in enumerate(zip(owned, expected, strict=True)) if one != other)
        owned[more] -= Counter(case.unused)
    assert owned == expected


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_gradient_arrives_at_the_same_parameters(case: Case) -> None:
    """The parameters that the gradient reaches in the graph are those in which autograd accumulates it."""
    ran = run_of(case)
    reached = {node.name for node in by_gradient(ran.graph) if node.kind == "parameter"}
    assert reached == accumulating(ran.behind, ran.net)
    assert reached == {name for name, parameter in ran.net.named_parameters() if parameter.grad is not None}
    assert reached


def _reentrant(net: Any, x: Tensor) -> Any:
    return checkpoint(lambda y: net.other(Scale.apply(y, net.scale)).tanh(), net.fc(x), use_reentrant=True)


def test_a_reentrant_checkpoint() -> None:
    """The ops in a reentrant checkpoint have one autograd node, which belongs to the last of them."""
    ran = run(scaled(_reentrant, fc=linear(), other=linear()), X)
    made = [(node.name, node.autograd) for node in ran.graph.nodes if node.autograd]
    assert made == [
        ("linear", ("AddmmBackward0", "TBackward0")),
        ("tanh", ("CheckpointFunctionBackward",)),
        ("square", ("PowBackward0",)),
        ("sum", ("SumBackward0",)),
    ]
    assert types_of(ran.behind) == Counter(name for _, names in made for name in names)
    (backward,) = (node.id for node in ran.graph.nodes if node.kind == "backward")
    reaching = {ran.graph[each].name for each in sources_of(ran.graph, backward) if ran.graph[each].kind == "parameter"}
    assert reaching == {name for name, parameter in ran.net.named_parameters() if parameter.grad is not None}
    assert len(reaching) == 5


# Random nets.


def _doubled_half(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 2:] *= 2
    return x


FUNCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.tanh,
    lambda x: x.view(2, 4),
    lambda x: x.t().exp().t(),
    lambda x: x.detach(),
    lambda x: torch.cat(x.chunk(2, dim=1)[::-1], dim=1),
    lambda x: torch.stack(x.unbind(0)),
    lambda x: x.clone().mul_(2).add_(1),
    lambda x: checkpoint(torch.sigmoid, x, use_reentrant=False),
    lambda x: Two.apply(x)[0],
)


@given(programs)
def test_random_nets(program: Program) -> None:
    """The laws hold for shared modules, loops, views, writes, detached parts, checkpoints and custom functions."""
    net = Block(program, FUNCTIONS)
    # A last layer, so that there is a gradient even if the program detaches everything.
    ran = run(Net(lambda net, x: net.block(x) * net.last(x), block=net, last=linear()), X)
    owned = Counter(name for node in by_gradient(ran.graph) for name in node.autograd)
    assert owned == types_of(ran.behind)
    reached = {node.name for node in by_gradient(ran.graph) if node.kind == "parameter"}
    assert reached == accumulating(ran.behind, ran.net)
    assert {"last.weight", "last.bias"} <= reached


@given(programs)
def test_random_nets_with_writes_into_views(program: Program) -> None:
    """Each node behind the loss has an owner, even where a write into a view makes torch create nodes again."""
    net = Block(program, (*FUNCTIONS, _doubled_half))
    ran = run(Net(lambda net, x: net.block(x) * net.last(x), block=net, last=linear()), X)
    owned = Counter(name for node in by_gradient(ran.graph) for name in node.autograd)
    assert types_of(ran.behind) - owned == Counter()
    assert set(owned - types_of(ran.behind)) <= {"SliceBackward0", "AsStridedBackward0"}
