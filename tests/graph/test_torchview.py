"""A comparison with torchview: equal numbers of nodes and edges and equal labels, or a reason for the difference."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F
from torchview import draw_graph

from lightning_recorder.graph import draw
from lightning_recorder.graph.views.fit import drawn_nodes
from tests.graph.nets import Net, X, linear
from tests.pairs import covering, pairs

IMAGES = torch.linspace(0.0, 1.0, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
ROWS = torch.linspace(-1.0, 1.0, 2 * 5 * 4).reshape(2, 5, 4)
TOKENS = torch.tensor([[1, 2, 3]])


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    args: tuple[Any, ...] = (X,)
    kwargs: dict[str, Any] | None = None
    mode: Literal["train", "eval"] = "eval"


# Nets.


def _residual() -> nn.Module:
    blocks = (Net(lambda net, x: x + net.inner(x), inner=nn.Sequential(linear(), nn.ReLU())) for _ in range(2))
    return nn.Sequential(*blocks, linear())


def _nested() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Sequential(linear(), nn.ReLU()), nn.Tanh()), nn.Sequential(linear()), nn.Sequential()
    )


def _shared(*, apart: bool) -> nn.Module:
    layer = linear()
    if apart:
        return nn.Sequential(nn.Sequential(layer, nn.ReLU()), nn.Sequential(nn.Tanh(), layer))
    return nn.Sequential(layer, nn.ReLU(), layer)


def _loop(rounds: int, **parts: nn.Module) -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        for _ in range(rounds):
            for part in net.children():
                x = part(x)
        return x

    return Net(forward, **parts)


def _branches(net: Any, x: Tensor) -> Tensor:
    return torch.cat([net.a(x), net.b(x), net.d(net.c(x))], 1)


def _written(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    y[0] = x[0]
    return net.b(y)  # type: ignore[no-any-return]  # a module's result


def _added_in_place(net: Any, x: Tensor) -> Tensor:
    y: Tensor = net.a(x)
    y += x
    return y.mul_(2).exp_()


def _used_twice(net: Any, x: Tensor) -> dict[str, Tensor]:
    y = net.a(x)
    return {"one": y, "other": net.b(y)}


def _attention(net: Any, x: Tensor) -> Tensor:
    query, key, value = (part(x).view(2, 5, 2, 2).transpose(1, 2) for part in (net.q, net.k, net.v))
    weights = F.softmax(query @ key.transpose(-1, -2) / 2, -1)
    return net.out((weights @ value).transpose(1, 2).reshape(2, 5, 4))  # type: ignore[no-any-return]  # a module result


def _block() -> nn.Module:
    attention = Net(_attention, q=linear(), k=linear(), v=linear(), out=linear())
    mlp = nn.Sequential(linear(4, 8), nn.GELU(), linear(8, 4))
    norms = {"first": nn.LayerNorm(4), "second": nn.LayerNorm(4)}
    return Net(_pre_norm, attention=attention, mlp=mlp, **norms)


def _pre_norm(net: Any, x: Tensor) -> Tensor:
    x = x + net.attention(net.first(x))
    return x + net.mlp(net.second(x))  # type: ignore[no-any-return]  # a module's result


class Residual(nn.Module):
    """A basic block of a ResNet."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.act = nn.ReLU(inplace=True)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm2(self.conv2(self.act(self.norm1(self.conv1(x)))))
        y += x if self.shortcut is None else self.shortcut(x)
        return self.act(y)  # type: ignore[no-any-return]  # a module's result


def _gru(net: Any, x: Tensor, hidden: Tensor) -> Tensor:
    for _ in range(3):
        hidden = net.cell(x, hidden)
    return hidden


def _lstm(net: Any, x: Tensor, hidden: Tensor, cell: Tensor) -> Tensor:
    for _ in range(3):
        hidden, cell = net.cell(x, (hidden, cell))
    return hidden


def _scaled() -> nn.Module:
    net = Net(lambda net, x: net.a(x) * net.scale.exp(), a=linear())
    net.scale = nn.Parameter(torch.ones(4))
    return net


def _hf_resnet() -> nn.Module:
    config = hf.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic")
    return hf.ResNetModel(config)


PAIR = Net(lambda net, x: (net.a(x), net.b(x)), a=linear(), b=linear())
CASES = {
    "chain": Case(lambda: nn.Sequential(linear(), nn.ReLU(), linear())),
    "nested": Case(_nested),
    "residual": Case(_residual),
    "branches": Case(lambda: Net(_branches, a=linear(), b=nn.Tanh(), c=linear(), d=nn.ReLU())),
    "shared": Case(lambda: _shared(apart=False)),
    "shared by two": Case(lambda: _shared(apart=True)),
    "reused": Case(
        lambda: Net(lambda net, x: net.act(net.b(net.act(net.a(x)))), a=linear(), b=linear(), act=nn.ReLU())
    ),
    "loop": Case(lambda: _loop(3, cell=linear())),
    "loop over two": Case(lambda: _loop(3, a=linear(), b=nn.ReLU())),
    "loop over a block": Case(lambda: _loop(2, block=nn.Sequential(linear(), linear()))),
    "in-place module": Case(lambda: nn.Sequential(linear(), nn.ReLU(inplace=True), linear())),
    "in-place functions": Case(lambda: Net(_added_in_place, a=linear())),
    "functions": Case(lambda: Net(lambda net, x: F.softmax(F.relu(net.a(x)), -1).sum(), a=linear())),
    "functions in a part": Case(lambda: nn.Sequential(Net(lambda _, x: x.exp().cos()), linear())),
    "views": Case(lambda: Net(lambda net, x: net.a(x).view(-1).reshape(4, 2).t().flip(0)[0], a=linear())),
    "numbers": Case(lambda: Net(lambda net, x: 1 - (2 * net.a(x)) / 3 + 1, a=linear())),
    "einsum": Case(lambda: Net(lambda net, x: torch.einsum("ij,kj->ik", net.a(x), x), a=linear())),
    "condition": Case(lambda: Net(lambda net, x: torch.where(x > 0, net.a(x), x), a=linear())),
    "two inputs": Case(lambda: Net(lambda net, x, y: net.a(x) + net.b(y), a=linear(), b=linear()), (X, X.clone())),
    "keywords": Case(lambda: Net(lambda net, x, y=None: net.a(x) + y, a=linear()), (X,), {"y": X.clone()}),
    "nested inputs": Case(lambda: Net(lambda net, each: net.a(each[0]) + each[1], a=linear()), ([X, X.clone()],)),
    "dict output": Case(lambda: Net(_used_twice, a=linear(), b=nn.ReLU())),
    "tuple output": Case(lambda: Net(lambda net, x: (net.a(x), (net.b(x),)), a=linear(), b=nn.ReLU())),
    "named output": Case(lambda: Net(lambda net, x: net.a(x).max(1), a=linear())),
    "several tensors": Case(lambda: Net(lambda net, x: torch.cat(net.a(x).chunk(2, 1)), a=linear())),
    "several from a part": Case(lambda: Net(lambda net, x: torch.add(*net.pair(x)), pair=PAIR)),
    "identity": Case(lambda: nn.Sequential(linear(), nn.Identity(), nn.ReLU())),
    "input given back": Case(lambda: nn.Sequential(linear(), Net(lambda _, x: x), nn.ReLU())),
    "unused result": Case(lambda: Net(lambda net, x: (net.a(x), net.b(x))[1], a=linear(), b=nn.ReLU())),
    "detach": Case(lambda: Net(lambda net, x: net.a(x).detach() + x, a=linear())),
    "embedding": Case(lambda: nn.Sequential(nn.Embedding(5, 4), linear()), (TOKENS,)),
    "conv": Case(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        (IMAGES,),
        None,
        "train",
    ),
    "ResNet": Case(lambda: nn.Sequential(Residual(3, 3), Residual(3, 5), nn.AdaptiveAvgPool2d(1)), (IMAGES,)),
    "ResNet of transformers": Case(_hf_resnet, (IMAGES,)),
    "GRU cell": Case(lambda: Net(_gru, cell=nn.GRUCell(4, 3)), (X, torch.zeros(2, 3))),
    "LSTM": Case(lambda: Net(lambda net, x: net.fc(net.lstm(x)[0]), lstm=nn.LSTM(4, 3), fc=linear(3)), (ROWS,)),
    "transformer block": Case(lambda: nn.Sequential(_block(), _block(), nn.LayerNorm(4)), (ROWS,)),
    "transformer": Case(lambda: nn.Transformer(4, 2, 1, 1, 8, batch_first=True), (ROWS, ROWS.clone()), None, "train"),
    # Drawn differently by torchview; see below.
    "no children": Case(linear),
    "attention": Case(lambda: Net(lambda net, x: net.part(x, x, x)[0], part=nn.MultiheadAttention(4, 2)), (ROWS,)),
    "same tensor twice": Case(lambda: Net(lambda net, x: net.a(x) + net.b(x + x), a=linear(), b=linear())),
    "same output twice": Case(lambda: Net(lambda net, x: (net.a(x),) * 2, a=linear())),
    "unused input": Case(lambda: Net(lambda net, x, y: net.a(x), a=linear()), (X, X.clone())),
    "made inside": Case(lambda: Net(lambda net, x: net.a(x) + torch.ones(4), a=linear())),
    "made like": Case(lambda: Net(lambda net, x: net.a(x) + torch.ones_like(x), a=linear())),
    "parameter": Case(_scaled),
    "index assignment": Case(lambda: Net(_written, a=linear(), b=nn.ReLU())),
    "nothing done": Case(lambda: Net(lambda net, x: net.a(x).contiguous().to(torch.float32), a=linear())),
    "attribute": Case(lambda: Net(lambda net, x: net.a(x).T, a=linear())),
    "dropout in eval": Case(lambda: nn.Sequential(linear(), nn.Dropout())),
}


# Both drawings.


class Drawn(NamedTuple):
    """The number of nodes with each label, and of tensors on the edges between each pair of labels."""

    nodes: Counter[str]
    edges: Counter[tuple[str, str]]

    @property
    def size(self) -> tuple[int, int]:
        return self.nodes.total(), self.edges.total()


# In-place and reflected operators count as one function, unless the order matters.
_SAME = {"radd": "add", "iadd": "add", "rmul": "mul", "truediv": "div"}
_KINDS = {"input": "input-tensor", "output": "output-tensor", "tensor": "hidden-tensor"}


def theirs(case: Case, **options: Any) -> Drawn:
    """Return the drawing by torchview, parsed from its document."""
    settings = {**options, **(case.kwargs or {})}
    picture = draw_graph(case.make(), list(case.args), device="cpu", mode=case.mode, strict=False, **settings)
    source = picture.visual_graph.source
    labels = {}
    for number, label in re.findall(r"^\s*(\d+) \[label=<(.*?)>\s+fillcolor", source, re.MULTILINE | re.DOTALL):
        (name,) = re.findall(r"<TD[^>]*>([^<]*)<BR/>depth", label)
        labels[number] = _SAME.get(name.strip("_"), name.strip("_"))
    edges = re.findall(r"^\s*(\d+) -> (\d+)", source, re.MULTILINE)
    return Drawn(Counter(labels.values()), Counter((labels[source], labels[target]) for source, target in edges))


def ours(case: Case, **options: Any) -> Drawn:
    """Return the drawing by this package, with the labels of torchview."""
    with torch.no_grad():
        whole: dict[str, Any] = {"fold": False, "max_nodes": None, "parameters": False, **options}
        view = draw(case.make(), case.args, input_kwargs=case.kwargs, mode=case.mode, all=True, **whole).view
    labels = {node.id: _KINDS.get(node.kind, node.type_name or node.name) for node in drawn_nodes(view)}
    edges: Counter[tuple[str, str]] = Counter()
    for edge in view.edges:
        edges[labels[edge.source], labels[edge.target]] += edge.multiplicity
    return Drawn(Counter(labels.values()), edges)


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "functions": {"hide_module_functions": False},
    "tensors": {"hide_inner_tensors": False},
    "rolled": {"roll": True},
}


class Difference(NamedTuple):
    net: str
    option: str
    theirs: tuple[int, int]
    """The number of nodes and edges in torchview's drawing."""
    ours: tuple[int, int]
    reason: str
    depth: int = 3


_ROOT = "torchview closes a model without submodules; here the model itself is always open"
_EMPTY = "torchview draws no function for a module that gives back what it took; here it stays to be seen"
_MADE = "torchview hides tensors that a model makes inside; here what makes them is a function"
_HEAD = "torchview merges the calls of a module without parameters only where they feed the same; here all of them"
DIFFERENCES = [
    Difference("no children", "default", (3, 2), (3, 2), _ROOT),
    Difference("attention", "default", (3, 2), (3, 2), "torchview opens what has submodules, called or not"),
    Difference("same tensor twice", "default", (6, 6), (6, 7), "torchview counts a tensor that is taken twice once"),
    Difference("same output twice", "default", (3, 2), (4, 3), "torchview draws a tensor once; here each path of it"),
    Difference("unused input", "default", (4, 2), (3, 2), "torchview draws it, joined to nothing"),
    Difference("made inside", "default", (4, 3), (5, 4), _MADE),
    Difference("made like", "default", (5, 4), (5, 5), "torchview loses where the result of ones_like goes"),
    Difference("parameter", "default", (4, 3), (5, 4), "torchview does not see functions of parameters alone"),
    Difference("index assignment", "default", (5, 4), (6, 6), "torchview does not see that a tensor is written to"),
    Difference("nothing done", "default", (5, 4), (3, 2), "here a function that gives back its input is left out"),
    Difference("attribute", "default", (4, 3), (4, 3), "torchview calls every attribute __get__, here it is T"),
    Difference("nested", "functions", (6, 5), (7, 6), _EMPTY),
    Difference("identity", "functions", (4, 3), (5, 4), _EMPTY),
    Difference("input given back", "functions", (4, 3), (5, 4), _EMPTY),
    Difference("dropout in eval", "functions", (4, 3), (4, 3), "torchview names the function; here it did nothing"),
    Difference("LSTM", "functions", (4, 3), (6, 5), _MADE),
    Difference("several tensors", "tensors", (8, 8), (7, 7), "here results of one shape share a node"),
    Difference("several from a part", "tensors", (6, 6), (5, 5), "here results of one shape share a node", 1),
    Difference("unused result", "tensors", (5, 4), (4, 3), "torchview draws results that nothing takes"),
    Difference("LSTM", "tensors", (7, 6), (5, 4), "torchview draws results that nothing takes"),
    Difference("shared by two", "rolled", (5, 5), (6, 5), "torchview merges calls across frames; here within one"),
    Difference("reused", "rolled", (6, 5), (5, 5), _HEAD),
    Difference("loop over two", "rolled", (5, 7), (4, 7), _HEAD),
    Difference("ResNet", "rolled", (18, 19), (16, 19), _HEAD),
    Difference("transformer block", "rolled", (49, 58), (51, 58), "torchview merges functions that feed the same one"),
]


def _differs(net: str, option: str) -> bool:
    # A difference with the default options occurs with every option, but only the default is listed.
    return any(each.net == net and each.option in ("default", option) for each in DIFFERENCES)


SAME = [(net, option, depth) for net in CASES for option in OPTIONS for depth in (1, 2, 3) if not _differs(net, option)]


@pytest.mark.parametrize(("net", "option", "depth"), covering(SAME, [pairs(each) for each in SAME]))
def test_same_picture(net: str, option: str, depth: int) -> None:
    """With the same options, both drawings have the same labels and the same edges between each pair of labels."""
    settings = {**OPTIONS[option], "depth": depth}
    assert ours(CASES[net], **settings) == theirs(CASES[net], **settings)


def _bert() -> nn.Module:
    return hf.BertModel(
        hf.BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
    )


def _vit() -> nn.Module:
    size = {"hidden_size": 8, "intermediate_size": 16, "image_size": 8, "patch_size": 4}
    return hf.ViTModel(hf.ViTConfig.from_dict({**size, "num_hidden_layers": 2, "num_attention_heads": 2}))


# Their parts also compute from buffers and parameters only, which torchview does not observe.
@pytest.mark.parametrize("case", [Case(_bert, (TOKENS,)), Case(_vit, (IMAGES,))], ids=["BERT", "ViT"])
def test_same_picture_of_transformers(case: Case) -> None:
    """At depth 1 models of transformers have the same drawing, including the inputs of each part."""
    assert ours(case, depth=1) == theirs(case, depth=1)


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda each: f"{each.net}, {each.option}")
def test_different_picture(difference: Difference) -> None:
    """The listed differences in size are exact."""
    settings = {**OPTIONS[difference.option], "depth": difference.depth}
    case = CASES[difference.net]
    assert (theirs(case, **settings).size, ours(case, **settings).size) == (difference.theirs, difference.ours)


@pytest.mark.parametrize("option", ["default", "rolled"])
def test_state_of_two_tensors(option: str) -> None:
    """Both tensors of an LSTM cell's state into its next call are counted, as torchview does."""
    case = Case(lambda: Net(_lstm, cell=nn.LSTMCell(4, 3)), (X, torch.zeros(2, 3), torch.zeros(2, 3)))
    assert ours(case, **OPTIONS[option]) == theirs(case, **OPTIONS[option])
