"""Views without some nodes: exact results for small models, laws for any model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from lightning_recorder.graph import (
    Graph,
    GraphCapture,
    capture_graph,
    collapse,
    drop_dead_ends,
    drop_isolated,
    fit_view,
    hide,
    without,
)
from lightning_recorder.graph.views.drop import PLUMBING
from tests.graph.nets import Net, X, bare, linear
from tests.graph.outline import outline, text
from tests.graph.queries import only, sources_of
from tests.graph.random_nets import graphs


def test_without() -> None:
    """Nodes of the given kinds are removed with their edges; all others are unchanged."""
    graph = capture_graph(nn.Sequential(linear()), X)
    bare = without(graph, ("parameter", "buffer", "output"))
    assert outline(bare, model_tensors=True, outputs=True) == "input\n0: Linear\n  linear <- input"
    linear_ = only(graph, "linear").id
    assert [edge.target for edge in without(graph, ("input", "buffer", "output")).edges] == [linear_, linear_]


def test_hide_leads_past() -> None:
    """The input of hidden functions is connected to the users of their output, also across several of them."""
    graph = capture_graph(Net(lambda _, x: x.exp().view(-1).reshape(2, 4).cos() + x.t().t()), X)
    assert outline(hide(graph, ("view", "reshape"))) == text(
        """
        input
        exp <- input
        cos <- exp
        t <- input
        t#2 <- t
        add <- cos, t#2
        """
    )
    assert outline(hide(graph, ("view", "reshape", "t"))) == text(
        """
        input
        exp <- input
        cos <- exp
        add <- cos, input
        """
    )


def test_a_hidden_index_names_the_part() -> None:
    """An edge past a function that takes a part of a tensor has the index or the number of the part."""

    def forward(_: Any, x: Tensor) -> Tensor:
        total: Tensor = x[:, 2:].exp().sum() + x.select(1, 3).cos().sum() + x.chunk(2)[1].tan().sum()
        return total + x.view(-1).sin().sum()

    hidden = hide(capture_graph(Net(forward), X), ("getitem", "select", "chunk", "view"))
    parts = {hidden[edge.target].name: edge.part for edge in hidden.edges}
    assert {name: parts[name] for name in ("exp", "cos", "tan", "sin")} == {
        "exp": "[:, 2:]",
        "cos": "[3]",
        "tan": "1",
        "sin": "",
    }


def test_hide_counts_tensors() -> None:
    """Two paths through hidden functions to one node are two tensors."""
    graph = capture_graph(Net(lambda _, x: torch.add(*x.exp().chunk(2, dim=1))), X)
    assert outline(hide(graph, ("chunk",))) == "input\nexp <- input\nadd <- exp ×2"


@pytest.mark.parametrize("cast", [lambda x: x.to(torch.float64), lambda x: x.type(torch.float64), lambda x: x.double()])
def test_a_change_of_the_dtype_is_hidden(cast: Callable[[Tensor], Tensor]) -> None:
    """Each way to write it is a function that computes nothing."""
    graph = capture_graph(Net(lambda _, x: cast(x.exp()).cos()), X)
    assert outline(hide(graph)) == "input\nexp <- input\ncos <- exp"


def test_hide_leaves_what_takes_several_tensors() -> None:
    """A function of several tensors, or of none, is never hidden."""
    graph = capture_graph(Net(lambda _, x: x.exp().maximum(x.cos()) + torch.zeros(2, 4)), X)
    assert hide(graph, ("maximum", "zeros")) == graph


def test_hidden_names_are_functions() -> None:
    """A module with the name of a hidden function stays."""
    graph = collapse(capture_graph(Net(lambda net, x: net.view(x), view=nn.ReLU()), X))
    assert hide(graph, ("view",)) == graph


@settings(max_examples=40)
@given(graph=graphs)
def test_hide_keeps_what_depends_on_what(graph: Graph) -> None:
    """If all hidden functions have one input, the paths between the remaining nodes are unchanged."""
    view = hide(graph, PLUMBING)
    assert [node for node in view.nodes if node.kind == "op" and node.name in PLUMBING] == []
    staying = {node.id for node in view.nodes}
    for node_id in staying:
        assert sources_of(view, node_id) == sources_of(graph, node_id) & staying


def test_additions_of_zero_are_left_out() -> None:
    """A sum with the number 0 is its other operand; the start of a longer sum, and other numbers, stay."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.first(x + 0)
        total: Any = 0
        for layer in net.layers:
            total = total + layer(x)
        return total + 1  # type: ignore[no-any-return]  # as above

    def views(layers: int) -> tuple[Graph, Graph]:
        net = Net(forward, first=linear(), layers=nn.ModuleList(linear() for _ in range(layers)))
        graph = capture_graph(net, X)
        return fit_view(graph), fit_view(graph, all=True)

    view, whole = views(2)
    lines = ["input", "first: Linear <- input", "layers.0: Linear <- first", "add <- layers.0"]
    lines += ["layers.1: Linear <- first", "add#2 <- add, layers.1", "add#3 <- add#2"]
    assert outline(view) == "\n".join(lines)
    assert view.left_out == ("1 zero addition",)
    assert (len(whole.nodes), whole.left_out) == (len(view.nodes) + 1, ())
    view, _ = views(4)
    assert outline(view).endswith("add <- add ×3 next, layers.0 ×4\nadd#2 <- add")
    assert view.left_out == ("1 zero addition",)


@pytest.mark.parametrize(("start", "names"), [(0.0, ["sub", "neg"]), (0, ["sub", "neg"]), (1, ["rsub", "sub", "neg"])])
def test_a_loop_that_subtracts_from_zero_is_folded(start: float, names: list[str]) -> None:
    """The first step, which subtracts a term from the number 0, is equal to the others. Another number stays."""

    def forward(net: Any, x: Tensor) -> Tensor:
        total: Any = start
        for layer in net.layers:
            total = total - layer(x)
        return total.neg()  # type: ignore[no-any-return]  # as above

    view = fit_view(capture_graph(Net(forward, layers=nn.ModuleList(linear() for _ in range(5))), X))
    assert [node.name for node in view.nodes if node.kind == "op"] == names
    ends = "sub <- sub ×4 next, layers.0 ×5" if names[0] == "sub" else "sub <- rsub first, sub ×3 next, layers.1 ×4"
    assert f"{ends}\n" in outline(view)


def test_a_difference_from_zero_that_is_subtracted_stays() -> None:
    """If ``0 - x`` is the second operand of a subtraction, or has several users, it is no start of a loop."""

    def forward(net: Any, x: Tensor) -> Tensor:
        one, other = 0 - net.first(x), 0 - net.second(x)
        return x.exp() - one + (other - x) * other.cos()  # type: ignore[no-any-return]  # as above

    view = fit_view(capture_graph(Net(forward, first=linear(), second=linear()), X))
    assert [node.name for node in view.nodes if node.name in ("sub", "rsub")] == ["rsub", "rsub", "sub", "sub"]


@pytest.mark.parametrize(("terms", "joined"), [(9, True), (5, True), (4, False)])
def test_a_long_sum_is_one_addition(terms: int, joined: bool) -> None:
    """Four or more additions in another order than their terms, as of the terms of a loss, become one addition."""

    def forward(net: Any, x: Tensor) -> Any:
        x = net.first(x)
        parts = [(x * number).sum() for number in range(terms)]
        return cast("Tensor", sum(parts[1::2]) + sum(parts[::2]))

    graph = capture_graph(Net(forward, first=linear()), X)
    view = fit_view(graph)
    additions = [node for node in view.nodes if node.name == "add"]
    assert len(additions) == (1 if joined else 5)
    assert [each.name for each in fit_view(graph, all=True).nodes].count("add") == terms + 1
    if joined:
        lines = ["input", "first: Linear <- input", f"(module) [{terms} times]", f"  mul <- first ×{terms}"]
        assert outline(view) == "\n".join([*lines, f"  sum <- mul ×{terms}", f"add <- sum ×{terms} all"])


@pytest.mark.parametrize("last", [lambda x: x + 1, lambda x: torch.add(x, x.exp(), alpha=2)])
def test_other_additions_are_not_joined(last: Callable[[Tensor], Tensor]) -> None:
    """An addition of a number or of a multiple stays, and so do residual connections."""

    def forward(_: Any, x: Tensor) -> Tensor:
        for function in (torch.sin, torch.cos, torch.tanh, torch.exp, torch.relu):
            x = x + function(x)
        x = x + x.sinh() + x.tan() + x.atan()
        return last(x)

    assert [node.name for node in fit_view(capture_graph(Net(forward), X)).nodes].count("add") == 9


def test_caches_are_left_out() -> None:
    """The keys and values that a model returns for later calls are counted, not drawn, and so is what computes them."""

    def forward(net: Any, x: Tensor, past_key_values: Any = None) -> dict[str, Any]:
        cache = []
        for place, layer in enumerate(net.layers):
            x = layer(x if past_key_values is None else x + past_key_values[place][0])
            cache.append((x.exp(), x))
        return {"logits": x, "past_key_values": cache, "cached": x.sin()}

    net = Net(forward, layers=nn.ModuleList(linear() for _ in range(2)))
    view = fit_view(capture_graph(net, X))
    lines = ["input", "layers.0: Linear <- input", "layers.1: Linear <- layers.0", "sin <- layers.1"]
    lines += ["output.logits <- layers.1", "output.cached <- sin"]
    assert outline(view, outputs=True) == "\n".join(lines)
    assert view.left_out == ("2 unused results", "4 cached tensors")
    assert "past_key_values" in outline(fit_view(capture_graph(net, X), all=True), outputs=True)
    later = fit_view(capture_graph(net, X, past_key_values=[(X + 1, X + 2), (X + 3, X + 4)]))
    assert "output.past_key_values" in outline(later, outputs=True)
    alone = fit_view(capture_graph(Net(lambda _, x: {"cache": [x.exp(), x.sin()]}), X))
    assert outline(alone, outputs=True).count("output.cache") == 2


def test_drop_isolated() -> None:
    """Tensors and functions without any edge are removed; calls stay."""

    def forward(net: Any, x: Tensor) -> Tensor:
        torch.zeros(3)
        net.idle(x)
        return x.exp()

    graph = capture_graph(Net(forward, idle=Net(lambda *_: None)), X)
    assert outline(graph) == "input\nzeros\nidle: Net\nexp <- input"
    assert outline(drop_isolated(graph)) == "input\nidle: Net\nexp <- input"


def test_drop_dead_ends() -> None:
    """If there is a loss or an output, functions without a path to it or into a call are removed."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x.exp().mean()  # a metric
        net.watch(x.cos())
        return torch.sum(net.fc(x.tanh()))

    net = Net(forward, fc=linear(), watch=Net(lambda _, x: x.sin()))
    with GraphCapture(net, X) as recording:
        net(X).backward()
    graph = collapse(without(recording.graph(), ("parameter", "buffer")))
    assert outline(drop_dead_ends(graph)) == text(
        """
        input
        cos <- input
        watch: Net <- cos
        tanh <- input
        fc: Linear <- tanh
        sum <- fc
        backward <- sum
        """
    )
    assert outline(drop_dead_ends(collapse(bare(net, X))), outputs=True) == text(
        """
        input
        cos <- input
        watch: Net <- cos
        tanh <- input
        fc: Linear <- tanh
        sum <- fc
        output <- sum
        """
    )


def test_dead_ends_without_a_loss_or_an_output_stay() -> None:
    """In a step without a backward pass, whose results are not recorded, nothing is removed."""
    with GraphCapture(linear(), X) as recording:
        X.exp().mean()
    assert drop_dead_ends(recording.graph()) is recording.graph()
