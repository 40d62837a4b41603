"""Functions that compute a constant as one node."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_recorder.graph import Graph, capture_graph, fit_view
from lightning_recorder.graph.model import IN_PLACE
from lightning_recorder.graph.renderers.labels import tied_to
from lightning_recorder.graph.views.constants import CONSTANT, UPDATE, UPDATED, join_constants
from tests.graph.nets import Net, X, linear


def _graph(*, random: bool = False, both: bool = False) -> Graph:
    """Return the graph of a model that scales its input by a table of four functions."""

    def forward(net: Any, x: Tensor) -> Tensor:
        start = torch.rand(4) if random else torch.arange(4)
        table = start.mul(-0.5).exp().neg()
        result: Tensor = net.fc(x) * table + (table.cos() if both else x)
        return result

    return capture_graph(Net(forward, fc=linear()), X)


def _functions(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes if node.kind == "op"]


def test_a_table_is_one_node() -> None:
    """Four functions without an input are one node with the first and last name, their number and the last shape."""
    view = fit_view(_graph())
    assert _functions(view) == ["arange … neg", "mul", "add"]
    (table,) = (node for node in view.nodes if node.name.startswith("arange"))
    assert (table.note, str(table.outputs[0])) == ("4 functions, no input", "[4]")
    assert [view[edge.target].name for edge in view.edges if edge.source == table.id] == ["mul"]


def test_each_function_is_shown_on_request() -> None:
    """With ``all=True`` the functions are apart."""
    assert _functions(fit_view(_graph(), all=True)) == ["arange", "mul", "exp", "neg", "mul", "add"]


def test_random_numbers_are_not_constant() -> None:
    """Functions of random numbers stay apart."""
    assert _functions(fit_view(_graph(random=True))) == ["rand", "mul", "exp", "neg", "mul", "add"]


def test_a_result_with_two_users_keeps_its_edges() -> None:
    """A constant that is used at two places is one node, from which a later constant is computed."""
    view = join_constants(fit_view(_graph(both=True), all=True))
    names = {node.id: node.name for node in view.nodes}
    assert sorted(_functions(view)) == ["add", "arange … neg", "cos", "mul"]
    users = sorted(names[edge.target] for edge in view.edges if names[edge.source] == "arange … neg")
    assert users == ["cos", "mul"]


def test_a_constant_that_a_call_computes_further_is_joined() -> None:
    """Functions of a table are one node, also if the open call that takes the table computes further from it alone."""

    def scale(net: Any, x: Tensor, table: Tensor) -> Tensor:
        return net.fc(x) * table.neg()  # type: ignore[no-any-return]  # the attributes of a Net are not declared

    def forward(net: Any, x: Tensor) -> Tensor:
        table = torch.arange(4).mul(-0.5).exp().sqrt()
        return net.inner(x, table)  # type: ignore[no-any-return]

    view = fit_view(capture_graph(Net(forward, inner=Net(scale, fc=linear())), X))
    assert _functions(view) == ["arange … sqrt", "neg", "mul"]


def test_a_buffer_of_one_number_is_a_constant() -> None:
    """Functions of a scalar buffer are one node with it; those of a larger buffer stay apart."""

    def forward(net: Any, x: Tensor) -> Tensor:
        factor = (net.stride + 1).sqrt().neg().exp()
        shift = (net.table + 1).sqrt().neg().exp()
        result: Tensor = net.fc(x) * factor + shift
        return result

    net = Net(forward, fc=linear())
    net.register_buffer("stride", torch.ones(()))
    net.register_buffer("table", torch.ones(4))
    view = fit_view(capture_graph(net, X))
    assert _functions(view) == ["add … exp", "add", "sqrt", "neg", "exp", "mul", "add"]
    assert [node.name for node in view.nodes if node.kind == "buffer"] == ["table"]


def test_a_number_that_is_computed_is_left_out() -> None:
    """A number from whole buffers and numbers is no node, as a literal is none; the caption counts its functions.

    A number that is a result, or that a layer or a sum takes, stays with its sources, and so does one of data, of a
    broken number or of chance.
    """

    def forward(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        size = (net.kernel - 1) // 2
        x = net.fc(x) * size * torch.tensor(2.0).log() + torch.rand(()) * net.heat.exp() * x.mean()
        return net.fc(x * net.act(torch.tensor(0.5).neg())), torch.zeros(()) + x.sum()

    net = Net(forward, fc=linear(), act=nn.ReLU())
    net.register_buffer("kernel", torch.tensor(3))
    net.register_buffer("heat", torch.tensor(1.0))
    graph = capture_graph(net, X)
    view = fit_view(graph)
    shown = ["mul", "mul", "rand", "exp", "mul", "mean", "mul", "add", "tensor", "neg", "mul", "zeros", "sum", "add"]
    assert _functions(view) == shown
    assert [node.name for node in view.nodes if node.kind == "buffer"] == ["heat"]
    assert view.left_out == ("5 constant numbers",)
    whole = fit_view(graph, all=True)
    assert whole.left_out == ()
    assert {"sub", "log"} < {*_functions(whole)}
    assert [node.name for node in whole.nodes if node.kind == "buffer"] == ["kernel", "heat"]


@pytest.mark.parametrize("way", ["data", "mul_", "lerp_"])
def test_a_moving_average_is_one_node(way: str) -> None:
    """The functions that update a second network are one node, which lists the parameters that no layer shows."""

    def forward(net: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mean, parameter in zip(net.mean.parameters(), net.live.parameters(), strict=True):
                if way == "data":
                    mean.data = mean.data * 0.9 + parameter.data * 0.1
                elif way == "mul_":
                    mean.mul_(0.9).add_(parameter, alpha=0.1)
                else:
                    mean.lerp_(parameter, 0.1)
            target = net.mean(x)
        return F.mse_loss(net.live(x), target)

    net = Net(forward, live=nn.Sequential(linear(), linear()), mean=nn.Sequential(linear(), linear()))
    view = fit_view(capture_graph(net.requires_grad_(), X))
    functions = [node for node in view.nodes if node.kind == "op"]
    count = {"data": 24, "mul_": 8, "lerp_": 4}[way]
    assert [node.note for node in functions][:1] == [f"{count} {UPDATE}"]
    assert tied_to(functions[0]) == "uses mean, live"
    assert [node.name for node in functions][1:] == ["mse_loss"]
    assert sorted(functions[0].tied) == sorted(name for name, _ in net.named_parameters())
    assert not [node for node in view.nodes if node.kind == "parameter"]
    assert {view[edge.target].name for edge in view.out_of(functions[0])} == {"mean.0", "mean.1"}


def test_a_moving_average_after_the_loss_is_drawn() -> None:
    """A function that changes a parameter stays, although its result is unused. Other unused results do not."""

    def forward(net: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            net.live.weight.mul(2).add_(1)
        loss = F.mse_loss(net.live(x), net.mean(x).detach())
        with torch.no_grad():
            net.mean.weight.mul_(0.9).add_(net.live.weight, alpha=0.1)
        return loss

    view = fit_view(capture_graph(Net(forward, live=linear(), mean=linear()), X))
    functions = [(node.name, node.note) for node in view.nodes if node.kind == "op"]
    assert functions[2:] == [("mul", IN_PLACE), ("add", IN_PLACE)]
    assert view.left_out == ("2 unused results",)


def test_a_table_that_is_changed_in_place_is_a_constant() -> None:
    """Functions that change a tensor that they made themselves do not change parameters."""
    net = Net(lambda net, x: net.fc(x) * torch.arange(4).mul(-0.5).exp_().sqrt(), fc=linear())
    view = fit_view(capture_graph(net, X))
    assert [node.note for node in view.nodes if node.kind == "op"] == [f"4 {CONSTANT}", ""]


def test_functions_of_parameters_with_a_gradient_stay() -> None:
    """Four functions that make a weight are shown, since they are trained."""

    def forward(net: Any, x: Tensor) -> Tensor:
        weight: Tensor = (net.scale * 2).exp().sin().cos()
        return x @ weight

    net: Any = Net(forward)
    net.scale = nn.Parameter(torch.ones(4, 4))
    view = fit_view(capture_graph(net, X))
    assert [node.name for node in view.nodes if node.kind == "op"] == ["mul", "exp", "sin", "cos", "matmul"]


@pytest.mark.parametrize("way", ["new values", "with a decay", "in place", "detached"])
def test_a_step_along_gradients_is_one_node(way: str) -> None:
    """The functions that compute a new value for each parameter from its gradient are one node, with all its edges.

    If functions stop the gradient, all of them are shown.
    """

    def forward(net: Any, x: Tensor) -> Tensor:
        loss = net.fc(x).square().mean()
        weights = net.fc.weight, net.fc.bias
        gradients = torch.autograd.grad(loss, weights, create_graph=way != "in place")
        if way == "in place":
            with torch.no_grad():
                for weight, gradient in zip(weights, gradients, strict=True):
                    weight.sub_(gradient * 0.1)
            return loss  # type: ignore[no-any-return]  # the attributes of a Net are not declared
        if way == "detached":
            gradients = tuple(gradient.detach() for gradient in gradients)
        decay = 0.9 if way == "with a decay" else 1
        pairs = zip(weights, gradients, strict=True)
        weight, bias = (weight * decay - gradient * 0.1 for weight, gradient in pairs)
        return F.linear(x.neg(), weight, bias)

    view = fit_view(capture_graph(Net(forward, fc=linear()).requires_grad_(), X))
    nodes = [(node.name, node.note) for node in view.nodes if node.kind == "op" and "functions" in node.note]
    if way == "in place":
        assert nodes == [("mul … sub", f"4 {UPDATE}")]
    elif way == "detached":
        assert nodes == []
        assert [node.note for node in view.nodes if node.name == "detach"] == 2 * ["stops the gradient: detach"]
    else:
        assert nodes == [("mul … sub", f"6 functions, 2 {UPDATED}")]
        (step,) = (node for node in view.nodes if node.note.endswith(UPDATED))
        assert sorted(step.tied) == ["fc.bias", "fc.weight"]
        ends = [(view[edge.source].name, view[edge.target].name) for edge in (*view.into(step), *view.out_of(step))]
        assert ends == [("grad", "mul … sub"), ("mul … sub", "linear")]
        assert [edge.multiplicity for edge in (*view.into(step), *view.out_of(step))] == [2, 2]


@pytest.mark.parametrize("steps", [3, 5])
def test_steps_along_gradients_are_a_loop(steps: int) -> None:
    """Two or more steps that update the tensors of the step before are drawn once, with their number."""

    def forward(net: Any, x: Tensor) -> Tensor:
        weights = dict(net.fc.named_parameters())
        for _ in range(steps):
            loss = torch.func.functional_call(net.fc, weights, (x,)).square().mean()
            gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            pairs = zip(weights.items(), gradients, strict=True)
            weights = {name: weight - gradient * 0.1 for (name, weight), gradient in pairs}
        return torch.func.functional_call(net.fc, weights, (x.neg(),))  # type: ignore[no-any-return]

    view = fit_view(capture_graph(Net(forward, fc=linear()).requires_grad_(), X))
    assert [node.repeats for node in view.nodes if view.children(node)] == [1, steps - 1]


def test_derivatives_are_no_step() -> None:
    """Functions of several gradients that compute no new value of each tensor stay apart, as in a residual."""

    def forward(net: Any, x: Tensor, t: Tensor) -> Tensor:
        u = net.fc(x + t)
        by_x, by_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
        return by_t + x * by_x - 0.1 * by_x * t

    graph = capture_graph(Net(forward, fc=linear()), X.clone().requires_grad_(), X.clone().requires_grad_())
    assert _functions(fit_view(graph))[2:] == ["mul", "add", "mul", "mul", "sub"]
