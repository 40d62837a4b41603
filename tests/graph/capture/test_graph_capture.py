"""Exact graphs of modules, functions and the tensors between them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_recorder.graph import Node, TensorMeta, capture_graph, draw, drop_isolated, to_mermaid, to_text
from tests.graph.nets import Net, X, linear
from tests.graph.outline import outline, text
from tests.graph.queries import only

# Modules and functions.


def test_sequential_with_its_parameters() -> None:
    """A layer's function is inside the layer's call and takes the layer's parameters."""
    assert outline(capture_graph(nn.Sequential(linear(), nn.ReLU()), X), model_tensors=True) == text(
        """
        input
        0: Linear
          0.weight
          0.bias
          linear <- input, 0.weight, 0.bias
        1: ReLU
          relu <- linear
        """
    )


X4 = TensorMeta((2, 4), "float32")
LINEAR = ("in_features", "4"), ("out_features", "3"), ("bias", "True")


def test_nodes_say_what_they_are() -> None:
    """A node has kind, class, parent, depth, own parameters, shapes, dtypes, autograd types and arguments."""
    own = TensorMeta((3, 4), "float32"), TensorMeta((3,), "float32")
    graph = capture_graph(nn.Sequential(nn.Linear(4, 3)), X)
    out = (TensorMeta((2, 3), "float32"),)
    assert graph.scope == "forward"
    assert graph.nodes == (
        Node(0, "module", "", None, 0, type_name="Sequential"),
        Node(1, "input", "input", 0, 1, outputs=(X4,)),
        Node(2, "module", "0", 0, 1, type_name="Linear", outputs=out, parameters=15, inputs=(X4,), arguments=LINEAR),
        Node(3, "parameter", "0.weight", 2, 2, outputs=own[:1]),
        Node(4, "parameter", "0.bias", 2, 2, outputs=own[1:]),
        Node(5, "op", "linear", 2, 2, outputs=out, autograd=("AddmmBackward0", "TBackward0"), inputs=(X4, *own)),
        Node(6, "output", "output", 0, 1, outputs=out),
    )


def test_in_place_relu_gives_the_same_graph() -> None:
    """An in-place ReLU has the same graph as one that allocates its output."""
    outside, inside = (nn.Sequential(linear(), nn.ReLU(inplace), linear()) for inplace in (False, True))
    assert capture_graph(inside, X) == capture_graph(outside, X)


def test_residual() -> None:
    """A sum has edges from both branches."""
    assert outline(capture_graph(Net(lambda net, x: x + net.fc(x), fc=linear()), X)) == text(
        """
        input
        fc: Linear
          linear <- input
        add <- input, linear
        """
    )


def test_module_called_twice() -> None:
    """Each call of a module is a node with its number; the parameters of the module occur once."""
    assert outline(capture_graph(Net(lambda net, x: net.fc(net.fc(x)), fc=linear()), X), model_tensors=True) == text(
        """
        input
        fc: Linear
          fc.weight
          fc.bias
          linear <- input, fc.weight, fc.bias
        fc: Linear (call 2)
          linear#2 <- linear, fc.weight, fc.bias
        """
    )


def test_module_under_two_names() -> None:
    """A module with two names is one module with the first name."""
    shared = linear()
    graph = capture_graph(Net(lambda net, x: net.second(net.first(x)), first=shared, second=shared), X)
    assert outline(graph) == text(
        """
        input
        first: Linear
          linear <- input
        first: Linear (call 2)
          linear#2 <- linear
        """
    )


def test_module_that_returns_its_input() -> None:
    """A module that returns its input is an op named identity."""
    assert outline(capture_graph(nn.Sequential(nn.Identity(), linear(), nn.Sequential()), X)) == text(
        """
        input
        0: Identity
          identity <- input
        1: Linear
          linear <- identity
        2: Sequential
          identity#2 <- linear
        """
    )


def test_a_tensor_is_passed_only_inside_the_call_that_passes_it() -> None:
    """The input of a module does not come from an identity inside the module before, which took the same tensor."""
    query, key = (nn.Sequential(nn.Identity(), linear()) for _ in range(2))
    net = Net(lambda net, x: (net.query(x), net.key(x), net.drop(x) + x), query=query, key=key, drop=nn.Dropout())
    assert outline(capture_graph(net.eval(), X)) == text(
        """
        input
        query: Sequential
          query.0: Identity
            identity <- input
          query.1: Linear
            linear <- identity
        key: Sequential
          key.0: Identity
            identity#2 <- input
          key.1: Linear
            linear#2 <- identity#2
        drop: Dropout
          identity#3 <- input
        add <- identity#3 ×2
        """
    )


def test_a_tensor_that_was_written_to_comes_from_its_writer() -> None:
    """After a module, its argument comes from the function that wrote into it there."""

    def forward(net: Any, x: Tensor) -> Tensor:
        y = x + 1
        net.inner(y)
        return net.last(y)  # type: ignore[no-any-return]  # the attributes of a Net are not declared

    inner = Net(lambda net, y: net.same(y).relu_() * 2, same=nn.Identity())
    graph = capture_graph(Net(forward, inner=inner, last=linear()), X)
    last = next(node for node in graph.nodes if node.name == "linear")
    assert graph[graph.into(last)[0].source].name == "relu"


def test_nested_modules() -> None:
    """Calls inside calls are nested in the graph."""
    inner = nn.Sequential(linear(), nn.Tanh())
    assert outline(
        capture_graph(Net(lambda net, x: net.block(x) * 2, block=nn.Sequential(inner, nn.Sigmoid())), X)
    ) == text(
        """
        input
        block: Sequential
          block.0: Sequential
            block.0.0: Linear
              linear <- input
            block.0.1: Tanh
              tanh <- linear
          block.1: Sigmoid
            sigmoid <- tanh
        mul <- sigmoid
        """
    )


class _Pair(NamedTuple):
    a: Tensor
    b: Tensor


@dataclass
class _Output:
    a: Tensor
    b: Tensor


@pytest.mark.parametrize(
    ("pack", "unpack"),
    [
        (lambda a, b: (a, b), lambda out: out),
        (lambda a, b: [a, b], lambda out: out),
        (lambda a, b: {"a": a, "b": b}, lambda out: out.values()),
        (_Pair, lambda out: out),
        (_Output, lambda out: (out.a, out.b)),
        (lambda a, b: {"nested": [(a, None), _Output(b, b)]}, lambda out: (out["nested"][0][0], out["nested"][1].a)),
    ],
    ids=["tuple", "list", "dict", "named tuple", "dataclass", "nested"],
)
def test_outputs_of_any_structure(pack: Any, unpack: Any) -> None:
    """Tensors are tracked through outputs of any structure."""

    def forward(net: Any, x: Tensor) -> Tensor:
        a, b = unpack(net.two(x))
        return torch.add(a, b)

    graph = capture_graph(Net(forward, two=Net(lambda _, x: pack(x.exp(), x.cos()))), X)
    assert outline(graph) == text(
        """
        input
        two: Net
          exp <- input
          cos <- input
        add <- exp, cos
        """
    )
    assert set(only(graph, "two").outputs) == {TensorMeta((2, 4), "float32")}


def test_inputs_of_any_structure() -> None:
    """Every input tensor is an input node named by its path."""
    graph = capture_graph(
        Net(lambda _, batch, *, scale: batch["x"] * batch["rest"][1] + scale),
        {"x": X, "rest": (3, X.clone()), "label": "none"},
        scale=torch.ones(()),
    )
    assert outline(graph) == text(
        """
        input[0].x
        input[0].rest[1]
        input.scale
        mul <- input[0].x, input[0].rest[1]
        add <- mul, input.scale
        """
    )


_UNSEEN = torch.ones(3)


class Slotted:
    """An output that is no container, with tensors in a slot and in a dictionary in an attribute of its attribute."""

    __slots__ = ("mean", "others")

    def __init__(self, mean: Tensor, other: Tensor) -> None:
        self.mean = mean
        self.others = SimpleNamespace(by_name={"other": [other]}, unseen=_UNSEEN)


@pytest.mark.parametrize(
    "make",
    [
        Slotted,
        lambda a, b: torch.distributions.Normal(a, b, validate_args=False),
        lambda a, b: torch.distributions.Independent(
            torch.distributions.Normal(a, b, validate_args=False), 1, validate_args=False
        ),
    ],
    ids=["class of its own", "distribution", "nested distribution"],
)
def test_an_output_object_is_a_node_with_its_class(make: Any) -> None:
    """A model may return an object that holds tensors; it is one output with its class and all of the tensors."""
    graph = capture_graph(Net(lambda net, x: {"d": make(net.layer(x), x.exp())}, layer=linear()), X)
    (node,) = (node for node in graph.nodes if node.kind == "output")
    assert (node.name, len(node.outputs)) == ("output.d", 2)
    assert {graph[edge.source].name for edge in graph.into(node)} == {"linear", "exp"}
    assert not graph.unused.parameters
    name = node.type_name
    assert name == type(make(X, X.exp())).__name__
    for shown in (to_text(graph), "\n".join(draw(graph).visual_graph.body), to_mermaid(graph)):
        assert name in shown


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (Tensor.item, "item"),
        (Tensor.tolist, "tolist"),
        (Tensor.numpy, "numpy"),
        (np.asarray, "array"),
        (float, "float"),
        (bool, "bool"),
    ],
)
def test_an_input_whose_value_is_read_has_a_function(read: Any, name: str) -> None:
    """An input that the model turns into a number or an array is used by that function; a result is not."""

    def forward(_: Net, x: Tensor, number: Tensor) -> Tensor:
        result = x.exp() * float(read(number))
        read(result.sum().detach())
        return result

    graph = drop_isolated(capture_graph(Net(forward), X, torch.ones(())))
    assert [(node.name, [graph[edge.source].name for edge in graph.into(node)]) for node in graph.nodes][3:5] == [
        ("exp", ["input[0]"]),
        (name, ["input[1]"]),
    ]
    assert sum(node.name == name for node in graph.nodes) == 1


def test_inputs_in_a_list_are_those_before_the_call() -> None:
    """A module that replaces the items of its list, as a detection head does, is described with what it was given."""

    def head(net: Any, features: list[Tensor], *, scale: Tensor) -> list[Tensor]:
        for place, each in enumerate(features):
            features[place] = net.layer(each) * scale
        return features

    for call in (
        lambda net, x: net.head([x, x[:1]], scale=x[0, 0]),
        lambda net, x: net.head(features=[x, x[:1]], scale=x[0, 0]),
    ):
        node = only(capture_graph(Net(call, head=Net(head, layer=linear(4, 3))), X), "head")
        assert [str(meta) for meta in node.inputs] == ["2×4", "1×4", "scalar"]
        assert [str(meta) for meta in node.outputs] == ["2×3", "1×3"]


def test_keyword_inputs_alone() -> None:
    """The inputs of a model that takes only keyword arguments are named by their keywords."""
    assert outline(capture_graph(Net(lambda _, *, a, b: a @ b.T), a=X, b=X.clone())) == text(
        """
        input.a
        input.b
        T <- input.b
        matmul <- input.a, T
        """
    )


def test_model_without_inputs() -> None:
    """The graph of a model without inputs and functions is its root."""
    graph = capture_graph(Net(lambda _: None))
    assert [(node.kind, node.type_name, node.parent) for node in graph.nodes] == [("module", "Net", None)]
    assert graph.edges == ()


def test_unused_input_stays_a_node() -> None:
    """An unused input is recorded."""
    assert outline(capture_graph(nn.Sequential(), X)) == "input"


# Shared memory and writes into it.


def test_write_through_a_view() -> None:
    """A write through a view is the source of all tensors that share the memory."""

    def forward(_: Net, x: Tensor) -> Tensor:
        x = x.exp()
        x.view(-1).mul_(2)
        return x.cos()

    assert outline(capture_graph(Net(forward), X)) == text(
        """
        input
        exp <- input
        view <- exp
        mul <- view
        cos <- mul
        """
    )


def test_view_of_what_was_written() -> None:
    """A view created before a write to its base takes its values from that write."""

    def forward(_: Net, x: Tensor) -> Tensor:
        x = x.exp()
        view = x.t()
        x.mul_(2)
        return view.cos()

    assert outline(capture_graph(Net(forward), X)) == text(
        """
        input
        exp <- input
        t <- exp
        mul <- exp
        cos <- mul
        """
    )


def test_view_without_a_write() -> None:
    """Creating a view does not change the source of its base."""

    def forward(_: Net, x: Tensor) -> Tensor:
        x = x.exp()
        view = x.view(-1)
        return x.sum() + view.sum()

    assert outline(capture_graph(Net(forward), X)) == text(
        """
        input
        exp <- input
        view <- exp
        sum <- exp
        sum#2 <- view
        add <- sum, sum#2
        """
    )


def test_index_assignment() -> None:
    """An index assignment is a node, and the source of the tensor from then on."""

    def forward(_: Net, x: Tensor) -> Tensor:
        x = x.exp()
        x[:, 0] = x[:, 1]
        return x.sum()

    assert outline(capture_graph(Net(forward), X)) == text(
        """
        input
        exp <- input
        getitem <- exp
        setitem <- exp, getitem
        sum <- setitem
        """
    )


def test_out_argument() -> None:
    """A function with ``out=`` is the source of the tensor that it wrote into."""

    def forward(_: Net, x: Tensor) -> Tensor:
        result = torch.empty(2, 4)
        torch.exp(x, out=result)
        return result.cos()

    assert outline(capture_graph(Net(forward), X)) == text(
        """
        input
        empty
        exp <- input, empty
        cos <- exp
        """
    )


def test_write_to_an_input() -> None:
    """The source of an input that was written to is the write."""
    assert outline(capture_graph(Net(lambda _, x: (x.mul_(2), x.cos())[1]), X.clone())) == text(
        """
        input
        mul <- input
        cos <- mul
        """
    )


def test_keyword_arguments_have_the_order_of_the_parameters() -> None:
    """The order in which a call writes its keyword arguments does not matter."""
    calls: list[Any] = [
        lambda _, x: torch.sub(x.exp(), x.cos()),
        lambda _, x: torch.sub(input=x.exp(), other=x.cos()),
        lambda _, x: torch.sub(x.exp(), other=x.cos()),
        lambda _, x: torch.sub(other=x.cos(), input=x.exp()),
    ]
    named = [outline(capture_graph(Net(call), X)).splitlines()[-1] for call in calls]
    assert named == ["sub <- exp, cos"] * 4


def test_places_among_the_outputs() -> None:
    """An edge tells which outputs of its source it has, in the order in which they are used."""

    def forward(_: Net, x: Tensor) -> Tensor:
        one, two, three = x.exp().split([1, 1, 2], dim=1)
        values, indices = torch.sort(three)
        return torch.cat([two, one, two, one, values, values.gather(1, index=indices)], dim=1)

    graph = capture_graph(Net(forward), X)
    named = [(graph[edge.source].name, graph[edge.target].name, edge.outputs) for edge in graph.edges]
    assert named == [
        ("input", "exp", ()),
        ("exp", "split", ()),
        ("split", "sort", (2,)),
        ("sort", "gather", (0, 1)),
        ("split", "cat", (1, 0, 1, 0)),
        ("sort", "cat", ()),
        ("gather", "cat", ()),
        ("cat", "output", ()),
    ]


class _Halves(torch.autograd.Function):
    """Returns the sine and the cosine of a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] + gradients[1]


def test_places_among_the_outputs_of_a_custom_function() -> None:
    """An edge from the second output of a custom function has the number 1, whichever node inside computed it."""

    def forward(net: Any, x: Tensor) -> Tensor:
        sine, cosine = _Halves.apply(net.fc(x))  # type: ignore[no-untyped-call]
        result: Tensor = cosine - sine
        return result

    graph = capture_graph(Net(forward, fc=linear()), X)
    (edge,) = (edge for edge in graph.edges if graph[edge.target].name == "sub")
    assert graph[edge.source].name == "_Halves"
    assert edge.outputs == (1, 0)


def _binarized(net: Any, x: Tensor) -> Tensor:
    net.fc.weight.data = net.fc.weight.detach().sign()
    x = net.fc(x)
    net.fc.weight.data = net.fc.bias.detach().expand(4, 4).tanh()
    return net.fc(x).sum()  # type: ignore[no-any-return]


def test_assignment_of_data() -> None:
    """A parameter whose data are replaced takes its values from the new data; all of its parameters are used."""
    graph = capture_graph(Net(_binarized, fc=nn.Linear(4, 4)), X)
    assert outline(graph, model_tensors=True) == text(
        """
        input
        fc.weight
        detach <- fc.weight
        sign <- detach
        set_data <- sign
        fc: Linear
          fc.bias
          linear <- input, set_data, fc.bias
        detach#2 <- fc.bias
        expand <- detach#2
        tanh <- expand
        set_data#2 <- tanh
        fc: Linear (call 2)
          linear#2 <- linear, set_data#2, fc.bias
        sum <- linear#2
        """
    )
    assert graph.root.used_parameters == 20


def test_assignment_of_data_to_a_parameter_that_was_not_read() -> None:
    """A parameter that is only used after its data were replaced counts as used."""

    def forward(net: Any, x: Tensor) -> Tensor:
        net.fc.weight.data = net.table.exp()
        return net.fc(x)  # type: ignore[no-any-return]

    net = Net(forward, fc=nn.Linear(4, 4, bias=False))
    net.register_buffer("table", torch.ones(4, 4))
    graph = capture_graph(net, X)
    assert outline(graph, model_tensors=True) == text(
        """
        input
        table
        exp <- table
        fc.weight
        set_data <- fc.weight, exp
        fc: Linear
          linear <- input, set_data
        """
    )
    assert graph.root.used_parameters == 16


def test_assignment_of_equal_data() -> None:
    """Moving a module to the device on which it is adds nothing."""
    net = Net(lambda net, x: net.fc.to("cpu")(x), fc=linear())
    assert outline(capture_graph(net, X)) == "input\nfc: Linear\n  linear <- input"


def test_chunk() -> None:
    """Two outputs of one function into the same node are one edge with two tensors."""

    def forward(_: Net, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=1)
        return left * right

    assert outline(capture_graph(Net(forward), X)) == text(
        """
        input
        chunk <- input
        mul <- chunk ×2
        """
    )


def test_unpacking_is_an_unbind() -> None:
    """Rows from tuple unpacking come from one unbind."""

    def forward(_: Net, x: Tensor) -> Tensor:
        first, _second = x
        return torch.sum(first)

    assert outline(capture_graph(Net(forward), X)) == text(
        """
        input
        unbind <- input
        sum <- unbind
        """
    )


def test_detach() -> None:
    """A detached tensor has an edge from the tensor whose values it shares."""
    assert outline(capture_graph(Net(lambda _, x: x.detach() + x), X)) == text(
        """
        input
        detach <- input
        add <- detach, input
        """
    )


# Tensors from elsewhere.


def test_created_tensors() -> None:
    """The source of a tensor created in the model is the function that created it."""
    assert outline(
        capture_graph(Net(lambda _, x: x + torch.zeros(4) + torch.arange(4) + torch.rand_like(x)), X)
    ) == text(
        """
        input
        zeros
        add <- input, zeros
        arange
        add#2 <- add, arange
        rand_like <- input
        add#3 <- add#2, rand_like
        """
    )


def test_tensor_from_outside() -> None:
    """A tensor that existed before, outside of batch and model, is one node however often it is used."""
    outside = torch.ones(4)
    assert outline(capture_graph(Net(lambda _, x: x + outside + outside), X)) == text(
        """
        input
        (tensor)
        add <- input, (tensor)
        add#2 <- add, (tensor)
        """
    )


def test_tied_weights() -> None:
    """A parameter with two owners is one node, in the call of its first owner."""
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    net[1].weight = net[0].weight
    assert outline(capture_graph(net, torch.tensor([1, 2])), model_tensors=True) == text(
        """
        input
        0: Embedding
          0.weight
          embedding <- input, 0.weight
        1: Linear
          linear <- embedding, 0.weight
        """
    )


def test_a_parameter_that_is_lent() -> None:
    """A parameter is in the call of the module that owns it, even if a module inside that call uses it first."""

    class Lender(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.part = Net(lambda _, x, weight: x * weight)

        def forward(self, x: Tensor) -> Tensor:
            lent: Tensor = self.part(x, self.weight)
            return lent

    assert outline(capture_graph(nn.Sequential(Lender()), X), model_tensors=True) == text(
        """
        input
        0: Lender
          0.part: Net
          0.weight
            mul <- input, 0.weight
        """
    )


def test_a_batch_norm_that_is_called_twice() -> None:
    """The second call takes only the output of the first; its buffers create no edge between them."""
    net = Net(lambda net, x: net.norm(net.norm(x)), norm=nn.BatchNorm1d(4, affine=False)).train()
    assert outline(capture_graph(net, X), model_tensors=True) == text(
        """
        input
        norm: BatchNorm1d
          norm.num_batches_tracked
          add <- norm.num_batches_tracked
          norm.running_mean
          norm.running_var
          batch_norm <- input, norm.running_mean, norm.running_var
        norm: BatchNorm1d (call 2)
          add#2 <- norm.num_batches_tracked
          batch_norm#2 <- batch_norm, norm.running_mean, norm.running_var
        """
    )


def test_buffers_of_a_batch_norm() -> None:
    """Running statistics are buffers of the layer, and their update creates no edge between layers."""
    net = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.BatchNorm1d(4, affine=False)).train()
    graph = capture_graph(net, X)
    assert outline(graph, model_tensors=True) == text(
        """
        input
        0: BatchNorm1d
          0.num_batches_tracked
          add <- 0.num_batches_tracked
          0.running_mean
          0.running_var
          batch_norm <- input, 0.running_mean, 0.running_var
        1: BatchNorm1d
          1.num_batches_tracked
          add#2 <- 1.num_batches_tracked
          1.running_mean
          1.running_var
          batch_norm#2 <- batch_norm, 1.running_mean, 1.running_var
        """
    )
    assert only(graph, "0.running_mean").kind == "buffer"


def test_modules_in_a_plain_list() -> None:
    """A module in a plain list, which torch does not register, is named by its location."""

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [linear(), linear()]

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    assert outline(capture_graph(Hidden(), X)) == text(
        """
        input
        layers[0]: Linear
          linear <- input
        layers[1]: Linear
          linear#2 <- linear
        """
    )


def test_control_flow() -> None:
    """The branches and iterations that are executed are recorded."""

    def forward(_: Net, x: Tensor) -> Tensor:
        for round_ in range(3):
            x = x.exp()
            if round_ == 1:
                x = x.relu()
        return x

    assert outline(capture_graph(Net(forward), X)) == text(
        """
        input
        exp <- input
        exp#2 <- exp
        relu <- exp#2
        exp#3 <- relu
        """
    )


def test_operators_have_their_plain_names() -> None:
    """An operator, its in-place form and the function have the same name, and its reflected form if it is equal."""

    def forward(_: Net, x: Tensor) -> Tensor:
        x = 1 + x
        x = x + 1
        x += 1
        x = x.add(1)
        x = 2 * x
        x *= 2
        x = 1 - x
        x -= 1
        x = 2 / x
        x /= 2
        return torch.relu_(x)

    names = [node.name for node in capture_graph(Net(forward), X).nodes if node.kind == "op"]
    assert names == ["add"] * 4 + ["mul"] * 2 + ["rsub", "sub", "rdiv", "div", "relu"]
