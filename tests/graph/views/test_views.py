"""Views: exact results for small models, laws for any model, limits for large models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_recorder import ArgumentError
from lightning_recorder.graph import (
    Edge,
    Graph,
    GraphCapture,
    Node,
    capture_graph,
    collapse,
    drop_dead_ends,
    drop_isolated,
    fit_view,
    fold_repeats,
    hide,
    truncate,
    without,
)
from lightning_recorder.graph.model import Kind
from lightning_recorder.graph.views.views import PLUMBING, drawn_nodes
from tests.graph.nets import Net, X, linear
from tests.graph.outline import outline, text
from tests.graph.queries import joined, only, reaches, sources_of
from tests.graph.random_nets import graphs


def block() -> nn.Module:
    """Return a residual block that is two levels deep."""
    inner = nn.Sequential(linear(), nn.ReLU())
    return Net(lambda net, x: x + net.inner(x), inner=inner)


def stack(number: int) -> nn.Module:
    return nn.Sequential(*(block() for _ in range(number)))


def bare(net: nn.Module, *inputs: Tensor) -> Graph:
    """Return a recording without the tensors of the model."""
    return without(capture_graph(net, *inputs), ("parameter", "buffer"))


def weight_of(graph: Graph, node: Node) -> int:
    """Return the number of recorded nodes that a node of a view represents."""
    total = node.repeats
    for call in graph.ancestors(node):
        total *= call.repeats
    return total


# collapse


def test_collapse_at_each_depth() -> None:
    """The depth is the number of visible levels of calls; deeper nodes are inside closed calls."""
    graph = bare(nn.Sequential(block(), nn.Tanh()), X)
    assert outline(collapse(graph, 1)) == text(
        """
        input
        0: Net <- input
        1: Tanh <- 0
        """
    )
    assert outline(collapse(graph, 2)) == text(
        """
        input
        0: Net
          0.inner: Sequential <- input
          add <- input, 0.inner
        1: Tanh <- add
        """
    )
    assert outline(collapse(graph, 3)) == text(
        """
        input
        0: Net
          0.inner: Sequential
            0.inner.0: Linear <- input
            0.inner.1: ReLU <- 0.inner.0
          add <- input, 0.inner.1
        1: Tanh <- add
        """
    )
    assert collapse(graph) == collapse(graph, 3) == collapse(graph, 99)


def test_closed_calls_add_up_their_parameters() -> None:
    """A closed call has the parameters of all of its contents."""
    graph = capture_graph(stack(2), X)
    assert [node.parameters for node in collapse(graph, 1).module_calls()] == [20, 20]
    assert only(collapse(graph, 2), "0.inner").parameters == 20


def test_a_closed_call_takes_a_tensor_once() -> None:
    """A tensor that a call reads three times inside is one tensor on the edge into the closed call."""
    graph = capture_graph(Net(lambda net, x: net.attention(x, x, x)[0], attention=nn.MultiheadAttention(4, 2)), X[None])
    assert outline(graph).endswith("multi_head_attention_forward <- input ×3")
    assert outline(collapse(graph)).endswith("attention: MultiheadAttention <- input")


def test_a_closed_call_gives_several_tensors() -> None:
    """Two tensors from inside a closed call to one function are two tensors on the edge."""
    pair = Net(lambda _, x: (x.exp(), x.cos()))
    graph = capture_graph(Net(lambda net, x: torch.add(*net.pair(x)), pair=pair), X)
    assert outline(collapse(graph)) == "input\npair: Net <- input\nadd <- pair ×2"


@pytest.mark.parametrize("depth", [0, -1, 1.5, True, "2"])
def test_depth_must_be_an_integer_of_at_least_one(depth: Any) -> None:
    """A depth that is below 1 or not an integer is rejected."""
    graph = capture_graph(stack(1), X)
    with pytest.raises(ArgumentError, match="depth"):
        collapse(graph, depth)
    with pytest.raises(ArgumentError, match="depth"):
        fit_view(graph, depth=depth)


def _closed(graph: Graph, depth: int | None) -> dict[int, int]:
    """Map each node to the outermost closed call around it, or to itself, by definition."""

    def is_closed(node: Node) -> bool:
        innermost = not any(child.kind == "module" for child in graph.children(node))
        return node.kind == "module" and node.parent is not None and (innermost or (depth or 99) <= node.depth)

    return {
        node.id: next((around.id for around in reversed([node, *graph.ancestors(node)]) if is_closed(around)), node.id)
        for node in graph.nodes
    }


@settings(max_examples=60)
@given(graph=graphs, depth=st.none() | st.integers(1, 4))
def test_collapse_is_what_it_says(graph: Graph, depth: int | None) -> None:
    """The nodes are those outside of closed calls, and the edges are exactly those between different ones of them."""
    view = collapse(graph, depth)
    target = _closed(graph, depth)
    assert [node.id for node in view.nodes] == [node.id for node in graph.nodes if target[node.id] == node.id]
    assert {(edge.source, edge.target) for edge in view.edges} == {
        (target[edge.source], target[edge.target]) for edge in graph.edges if target[edge.source] != target[edge.target]
    }
    assert sum(node.parameters for node in view.nodes) == sum(node.parameters for node in graph.nodes)


@settings(max_examples=40)
@given(graph=graphs, depth=st.integers(1, 4))
def test_collapse_keeps_what_depends_on_what(graph: Graph, depth: int) -> None:
    """A path between two nodes becomes a path between the calls that they are merged into."""
    view, target = collapse(graph, depth), _closed(graph, depth)
    for node in graph.nodes:
        assert {target[source] for source in sources_of(graph, node.id)} <= sources_of(view, target[node.id])


@settings(max_examples=40)
@given(graph=graphs)
def test_deepest_depth_is_the_innermost_closing(graph: Graph) -> None:
    """From the deepest call on, the depth makes no difference, and collapsing twice is equal to collapsing once."""
    deepest = max((node.depth for node in graph.module_calls()), default=1)
    assert collapse(graph, deepest) == collapse(graph, deepest + 3) == collapse(graph)
    assert collapse(collapse(graph)) == collapse(graph)


# without, hide, drop_isolated


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


def test_hide_counts_tensors() -> None:
    """Two paths through hidden functions to one node are two tensors."""
    graph = capture_graph(Net(lambda _, x: torch.add(*x.exp().chunk(2, dim=1))), X)
    assert outline(hide(graph, ("chunk",))) == "input\nexp <- input\nadd <- exp ×2"


def test_hide_leaves_what_takes_several_tensors() -> None:
    """A function of several tensors, or of none, is never hidden."""
    graph = capture_graph(Net(lambda _, x: x.exp().expand_as(x.cos()) + torch.zeros(2, 4)), X)
    assert hide(graph, ("expand_as", "zeros")) == graph


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
    """If there is a loss, functions without a path to the loss or into a call are removed."""

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
    assert drop_dead_ends(bare(net, X)) == bare(net, X)


# fold_repeats


def test_calls_that_show_different_things_stay_apart() -> None:
    """Two equal calls are not folded if a view has removed an unused result of one of them."""
    blocks = [Net(lambda net, x: net.fc(x).exp(), fc=linear()) for _ in range(2)]

    def forward(net: Any, x: Tensor) -> Tensor:
        net.first(x)  # unused
        return torch.sum(net.second(x))

    net = Net(forward, first=blocks[0], second=blocks[1])
    with GraphCapture(net, X) as recording:
        net(X).backward()
    graph = without(recording.graph(), ("parameter", "buffer"))
    assert outline(fold_repeats(drop_dead_ends(graph), contents=graph)) == text(
        """
        input
        first: Net
          first.fc: Linear
        second: Net
          second.fc: Linear
            linear <- input
          exp <- linear
        sum <- exp
        backward <- sum
        """
    )


def test_twelve_blocks_are_drawn_once() -> None:
    """Consecutive equal blocks become the first of them, with their number."""
    view = fold_repeats(collapse(bare(stack(12), X)))
    assert outline(view) == text(
        """
        input
        0: Net [12 times]
          0.inner: Sequential
            0.inner.0: Linear <- input
            0.inner.1: ReLU <- 0.inner.0 ×12
          add <- input, 0.inner.1 ×12
        """
    )


def test_parameters_do_not_keep_blocks_apart() -> None:
    """Blocks whose parameters are drawn are folded, although the parameters have different names."""
    graph = capture_graph(stack(12), X)
    assert [node.repeats for node in fold_repeats(graph).children(graph.root) if node.kind == "module"] == [12]


def test_inputs_of_every_block_are_counted() -> None:
    """A tensor that goes into each of five blocks is five tensors on its edge."""
    layers = {f"layer{index}": Net(lambda net, x, mask: net.fc(x) * mask, fc=linear()) for index in range(5)}

    def forward(net: Any, x: Tensor, mask: Tensor) -> Tensor:
        for name in layers:
            x = getattr(net, name)(x, mask)
        return x

    view = fold_repeats(collapse(bare(Net(forward, **layers), X, X.clone())))
    assert outline(view) == text(
        """
        input[0]
        input[1]
        layer0: Net [5 times]
          layer0.fc: Linear <- input[0]
          mul <- layer0.fc ×5, input[1] ×5
        """
    )


def test_units_of_several_siblings() -> None:
    """A repeated group of siblings, functions included, is folded into a frame without a name."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for index in range(4):
            x = getattr(net, f"fc{index}")(x).relu()
        return x.exp()

    layers = {f"fc{index}": linear() for index in range(4)}
    view = fold_repeats(collapse(bare(Net(forward, **layers), X)))
    assert outline(view) == text(
        """
        input
        (module) [4 times]
          fc0: Linear <- input
          relu <- fc0 ×4
        exp <- relu
        """
    )


def test_side_by_side_is_no_repetition() -> None:
    """Equal parallel layers, such as query, key and value, keep their names; a chain is folded."""
    qkv = Net(lambda net, x: net.q(x) + net.k(x) + net.v(x), q=linear(), k=linear(), v=linear())
    names = [node.name for node in fold_repeats(collapse(bare(qkv, X))).module_calls()]
    assert names == ["q", "k", "v"]
    chain = nn.Sequential(linear(), linear(), linear())
    assert outline(fold_repeats(collapse(bare(chain, X)))) == text(
        """
        input
        0: Linear [3 times] <- input
        """
    )


def test_two_layers_are_no_repetition_but_two_blocks_are() -> None:
    """At least three equal layers are folded, or two equal calls that contain others."""
    layers = bare(nn.Sequential(linear(), linear()), X)
    assert fold_repeats(collapse(layers)) == collapse(layers)
    blocks = fold_repeats(collapse(bare(stack(2), X)))
    assert [(node.name, node.repeats) for node in blocks.children(blocks.root) if node.kind == "module"] == [("0", 2)]


def test_least_number_of_repetitions() -> None:
    """The smallest number of equal layers to fold is an argument."""
    graph = collapse(bare(nn.Sequential(*(linear() for _ in range(4))), X))
    assert fold_repeats(graph, least=5) == graph
    assert [node.repeats for node in fold_repeats(graph, least=4).module_calls()] == [4]


def test_nested_repetitions() -> None:
    """Nested repetitions are folded at each level."""
    stages = nn.Sequential(*(stack(3) for _ in range(2)))
    view = fold_repeats(collapse(bare(stages, X)))
    assert outline(view) == text(
        """
        input
        0: Sequential [2 times]
          0.0: Net [3 times]
            0.0.inner: Sequential
              0.0.inner.0: Linear <- input
              0.0.inner.1: ReLU <- 0.0.inner.0 ×6
            add <- input, 0.0.inner.1 ×6
        """
    )


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU()), "parameters"),
        (lambda: nn.Sequential(linear(), nn.Tanh()), "class inside"),
        (lambda: nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), nn.ReLU()), "dtype"),
        (lambda: nn.ModuleDict({"a": linear(), "b": nn.ReLU()}), "class"),
        (lambda: nn.Sequential(linear(), nn.ReLU(), nn.Identity()), "number of parts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_differs_is_not_folded(odd: Callable[[], nn.Module], why: str) -> None:
    """A block with another class, size, dtype or content interrupts a repetition."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for part in net.children():
            for each in part.values() if isinstance(part, nn.ModuleDict) else (part,):
                x = each(x.to(next(part.parameters()).dtype))
        return x

    plain = {name: nn.Sequential(linear(), nn.ReLU()) for name in "abxyz"}
    net = Net(forward, a=plain["a"], b=plain["b"], odd=odd(), x=plain["x"], y=plain["y"], z=plain["z"])
    view = fold_repeats(hide(collapse(bare(net, X)), ("to",)))
    repeats = {node.name: node.repeats for node in view.module_calls() if node.repeats > 1}
    assert repeats == {"a": 2, "x": 3}


def test_many_side_by_side() -> None:
    """More than eight equal parallel layers are folded and marked as parallel, and so are two equal blocks."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return torch.cat([each(x) for each in net.children()])

    for number, make in ((9, linear), (2, lambda: nn.Sequential(linear(), nn.ReLU()))):
        net = Net(forward, **{f"head{index}": make() for index in range(number)})
        view = fold_repeats(collapse(bare(net, X)))
        (head,) = (node for node in view.children(view.root) if node.kind == "module")
        assert (head.repeats, head.parallel) == (number, True)
        assert {edge.multiplicity for edge in view.edges if view[edge.target].kind != "output"} == {number}
    chain = fold_repeats(collapse(bare(stack(3), X)))
    assert [node.parallel for node in chain.children(chain.root) if node.kind == "module"] == [False]


@settings(max_examples=60)
@given(graph=graphs, least=st.integers(2, 4), whole=st.booleans())
def test_folding_loses_no_node(graph: Graph, least: int, whole: bool) -> None:
    """With its repetitions, a folded view has the same number of nodes and parameters."""
    before = graph if whole else without(collapse(graph), ("parameter", "buffer"))
    view = fold_repeats(before, least)
    recorded = [node for node in view.nodes if node.type_name or node.kind != "module"]  # frames have no class
    assert sum(weight_of(view, node) for node in recorded) == len(before.nodes)
    assert sum(weight_of(view, node) * node.parameters for node in view.nodes) == sum(
        node.parameters for node in before.nodes
    )


# truncate


@pytest.mark.parametrize("max_nodes", [1, 2, 3, 10, 49, 50])
def test_truncate_keeps_both_ends(max_nodes: int) -> None:
    """A long chain keeps its beginning and its end, two to one, and a node between them shows the number removed."""

    def forward(_: Net, x: Tensor) -> Tensor:
        for _round in range(50):
            x = x.exp()
        return x

    graph = without(capture_graph(Net(forward), X), ["output"])  # 51 drawn nodes, including the input
    view = truncate(graph, max_nodes)
    names = [node.name for node in drawn_nodes(view)]
    assert len(names) == max_nodes
    assert names.count(f"… {51 - max_nodes + 1} more") == 1
    more = names.index(f"… {51 - max_nodes + 1} more")
    assert more == (max_nodes - 1) * 2 // 3
    assert joined(view) >= {(names[more], "exp")} if more < max_nodes - 1 else True


def test_truncate_leaves_what_fits() -> None:
    """A graph with at most the allowed number of nodes is unchanged."""
    graph = capture_graph(stack(1), X)
    assert truncate(graph, len(drawn_nodes(graph))) is graph


@pytest.mark.parametrize("max_nodes", [1, 5, 20])
def test_truncate_of_a_nested_model(max_nodes: int) -> None:
    """A call that has lost all of its contents is not drawn, so the limit holds for nested models."""
    assert len(drawn_nodes(truncate(capture_graph(stack(30), X), max_nodes))) <= max_nodes


@pytest.mark.parametrize("view", [truncate, fit_view])
@pytest.mark.parametrize("max_nodes", [0, -1, 2.5, True, None])
def test_max_nodes_must_be_an_integer_of_at_least_one(view: Callable[[Graph, Any], Graph], max_nodes: Any) -> None:
    """A limit that is below 1 or not an integer is rejected."""
    with pytest.raises(ArgumentError, match="max_nodes"):
        view(capture_graph(stack(1), X), max_nodes)


# fit


def test_fit_of_a_small_model() -> None:
    """If the whole model fits, all modules are open, without parameters and unused inputs."""
    graph = capture_graph(Net(lambda net, x, y: net.block(x).view(-1), block=block()), X, X.clone())
    assert outline(fit_view(graph), model_tensors=True) == text(
        """
        input[0]
        block: Net
          block.inner: Sequential
            block.inner.0: Linear <- input[0]
            block.inner.1: ReLU <- block.inner.0
          add <- input[0], block.inner.1
        view <- add
        """
    )


def test_fit_takes_the_greatest_depth_that_fits() -> None:
    """In too large a view, calls are closed level by level."""
    # Four blocks of different width, so that nothing is folded: 4 nodes each when open, 2 at depth 2, 1 at depth 1.
    inner = (nn.Sequential(linear(4, width), nn.ReLU(), linear(width, 4)) for width in (1, 2, 3, 5))
    net = nn.Sequential(*(Net(lambda net, x: x + net.inner(x), inner=each) for each in inner))
    graph = without(capture_graph(net, X), ["output"])
    sizes = {limit: len(drawn_nodes(fit_view(graph, limit))) for limit in (17, 16, 9, 8, 5)}
    assert sizes == {17: 17, 16: 9, 9: 9, 8: 5, 5: 5}


def test_fit_takes_a_depth() -> None:
    """With a depth no deeper level is opened, even if it would fit."""
    assert [node.name for node in fit_view(capture_graph(stack(1), X), depth=1).module_calls()] == ["0"]


def test_fit_hides_plumbing_in_larger_views() -> None:
    """Functions that only move values are drawn in a view of up to 60 nodes and hidden in a larger one."""

    def forward(_: Net, x: Tensor, rounds: int) -> Tensor:
        for _round in range(rounds):
            x = x.exp().view(2, 4)
        return x

    small, large = (fit_view(capture_graph(Net(lambda net, x, n=n: forward(net, x, n)), X)) for n in (29, 30))
    assert [node.name for node in small.nodes].count("view") == 29  # 59 nodes with the input
    assert [node.name for node in large.nodes].count("view") == 0  # there would be 61 nodes


def _chain_of_ops(_: Net, x: Tensor) -> Tensor:
    for index in range(1000):
        x = (x.exp(), x.cos(), x + x)[index % 3]
    return x


def _gpt2() -> nn.Module:
    config = hf.GPT2Config(vocab_size=20, n_positions=8, n_embd=12, n_layer=12, n_head=2)
    return hf.GPT2LMHeadModel(config)


LARGE: dict[str, Callable[[], Graph]] = {
    "300 equal layers": lambda: capture_graph(nn.Sequential(*(linear() for _ in range(300))), X),
    "300 different layers": lambda: capture_graph(
        nn.Sequential(nn.Linear(4, 1), *(nn.Linear(width, width + 1) for width in range(1, 300))), X
    ),
    "1000 functions": lambda: capture_graph(Net(_chain_of_ops), X),
    "GPT-2": lambda: capture_graph(_gpt2(), input_ids=torch.tensor([[1, 2]]), labels=torch.tensor([[1, 2]])),
    "nothing": lambda: capture_graph(Net(lambda _: None)),
}


@pytest.mark.parametrize("make", LARGE.values(), ids=LARGE)
def test_fit_holds_its_limit(make: Callable[[], Graph]) -> None:
    """A view of any model has at most the allowed number of nodes."""
    graph = make()
    for limit in (1, 2, 7, 40, 150):
        view = fit_view(graph, limit)
        assert len(drawn_nodes(view)) <= limit
        _assert_sound(view)


def test_fit_of_equal_layers_is_one_layer() -> None:
    """300 equal consecutive layers are one, with their number."""
    assert outline(fit_view(LARGE["300 equal layers"]())) == "input\n0: Linear [300 times] <- input"


def test_fit_of_gpt2_shows_one_block() -> None:
    """Twelve transformer blocks are drawn as one open block, from the tokens to the loss."""
    view = fit_view(LARGE["GPT-2"]())
    (block_,) = (node for node in view.module_calls() if node.type_name == "GPT2Block")
    assert block_.repeats == 12
    assert {"ln_1", "attn", "ln_2", "mlp"} <= {node.name.rpartition(".")[2] for node in view.children(block_)}
    assert reaches(view, "input.input_ids", "cross_entropy")


VIEWS: dict[str, Callable[[Graph], Graph]] = {
    "collapse": lambda graph: collapse(graph, 2),
    "collapse to the innermost": collapse,
    "without": lambda graph: without(graph, ("parameter", "tensor")),
    "hide": hide,
    "drop_isolated": drop_isolated,
    "drop_dead_ends": drop_dead_ends,
    "fold_repeats": lambda graph: fold_repeats(collapse(without(graph, ("parameter", "buffer")))),
    "truncate": lambda graph: truncate(graph, 4),
    "fit": lambda graph: fit_view(graph, 5),
}


def _assert_sound(view: Graph) -> None:
    place = {node.id: position for position, node in enumerate(view.nodes)}
    assert len(place) == len(view.nodes)
    assert view.root.parent is None
    for node in view.nodes[1:]:
        assert node.parent is not None
        assert place[node.parent] < place[node.id]
        # The frames around repeated siblings have no class; they are not calls and do not add to the depth.
        assert node.depth == sum(bool(around.type_name) for around in view.ancestors(node))
    recorded = [node.id for node in view.nodes if node.type_name or node.kind != "module"]
    assert recorded == sorted(recorded)
    ends = [(edge.source, edge.target) for edge in view.edges]
    assert len(set(ends)) == len(ends)
    # A parameter that a part borrows from its parent is first used inside that part, so it comes after the part.
    computed = [(source, target) for source, target in ends if view[source].kind in ("module", "op", "input")]
    assert [(source, target) for source, target in computed if place[source] >= place[target]] == []
    assert [edge for edge in view.edges if edge.multiplicity < 1] == []
    assert all(node.kind in get_args(Kind) for node in view.nodes)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@settings(max_examples=40)
@given(graph=graphs)
def test_every_view_is_a_sound_graph(view: Callable[[Graph], Graph], graph: Graph) -> None:
    """Edges join existing nodes and go forward in time, parents exist, and the recording is unchanged."""
    before = graph.to_json()
    _assert_sound(view(graph))
    assert graph.to_json() == before
    assert view(graph).scope == graph.scope


@settings(max_examples=60)
@given(graph=graphs, max_nodes=st.integers(1, 30), depth=st.none() | st.integers(1, 4))
def test_fit_holds_its_limit_for_every_model(graph: Graph, max_nodes: int, depth: int | None) -> None:
    """The limit holds for any model and depth."""
    view = fit_view(graph, max_nodes, depth)
    assert len(drawn_nodes(view)) <= max_nodes
    assert depth is None or all(node.depth <= depth for node in view.module_calls())


def test_edges_of_a_view_say_what_flows() -> None:
    """An edge of a view has the shape of its tensor."""
    view = fit_view(capture_graph(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), X))
    assert [(str(edge.tensor), edge) for edge in view.edges] == [
        ("2×4", Edge(1, 2)),
        ("2×3", Edge(2, 6)),
        ("2×3", Edge(6, 8)),
    ]
