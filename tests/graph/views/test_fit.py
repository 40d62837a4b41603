"""Views with a limited number of nodes: exact results for small models, limits for large models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

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
    capture_graph,
    fit_view,
    record,
    truncate,
    without,
)
from lightning_recorder.graph.renderers.labels import unused
from lightning_recorder.graph.views.fit import drawn_nodes
from tests.graph.nets import Net, X, block, linear, record_step, stack
from tests.graph.outline import outline, text
from tests.graph.queries import assert_sound, joined, only, reaches
from tests.graph.random_nets import graphs


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
    assert more == (max(1, (max_nodes - 1) * 2 // 3) if max_nodes > 1 else 0)  # the input stays longest
    assert joined(view) >= {(names[more], "exp")} if more < max_nodes - 1 else True


@pytest.mark.parametrize("max_nodes", [1, 4, 7, 8, 12, 30])
def test_truncate_removes_modules_last(max_nodes: int) -> None:
    """Functions between modules go first; a node outside of the loss stands for those of the model before it."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for layer in (net.a, net.b, net.c):
            x = layer(x)
            for _ in range(9):
                x = x.sin()
        return x

    net = Net(forward, a=linear(), b=linear(), c=linear())
    with GraphCapture(net, X, scope="training_step") as recording:
        net(X).sum().backward()
    view = truncate(fit_view(recording.graph(), 40, fold=False), max_nodes)
    drawn = drawn_nodes(view)
    assert len(drawn) <= max_nodes
    layers = [node.name for node in drawn if node.kind == "module"]
    assert layers == ["a", "b", "c"] if max_nodes > 7 else len(layers) < 3
    stretches = [node for node in drawn if "more" in node.name]
    assert {node.scope for node in stretches if node.id < only(recording.graph(), "c").id} <= {"training_step"}
    assert all(edge.source < edge.target for edge in view.edges)


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


def test_fit_opens_the_module_with_most_parameters_further() -> None:
    """A loss with many functions does not keep the network closed; with less room, an inner module stays closed."""
    net = Net(lambda net, x: net.loss(net.backbone(x)), backbone=backbone(), loss=long_loss())
    graph = without(capture_graph(net, X), ["output"])
    opened = """
        input
        backbone: Net
          backbone.stem: Linear <- input
          backbone.layers: Sequential
            backbone.layers.0: Linear <- backbone.stem
            backbone.layers.1: Linear <- backbone.layers.0
          add <- backbone.stem, backbone.layers.1
        loss: Net <- add
        """
    assert outline(fit_view(graph, 6)) == text(opened)
    closed = opened[: opened.index("            backbone.layers.0")].replace(
        "Sequential", "Sequential <- backbone.stem"
    )
    closed += opened[opened.index("          add") :].replace("layers.1", "layers")
    assert [outline(fit_view(graph, limit)) for limit in (5, 3)] == [
        text(closed),
        text("input\nbackbone: Net <- input\nloss: Net <- backbone"),
    ]


def test_fit_opens_no_module_further_below_a_given_depth() -> None:
    """The depth of the user holds for the module with most parameters, too."""
    net = Net(lambda net, x: net.loss(net.backbone(x)), backbone=backbone(), loss=long_loss())
    assert {node.depth for node in fit_view(capture_graph(net, X), 6, 1).module_calls()} == {1}


def test_fit_opens_all_calls_of_the_module_with_most_parameters() -> None:
    """Two calls of one network are both open or both closed."""
    shared = backbone()
    net = Net(lambda net, x: net.loss(net.twin(x) - net.twin(x + 1)), twin=shared, loss=long_loss())
    graph = capture_graph(net, X)
    for limit in range(4, 20):
        view = fit_view(graph, limit, fold=False)
        inside = [
            sum(node.parent == call.id for node in view.nodes) for call in view.module_calls() if call.name == "twin"
        ]
        assert len(set(inside)) == 1, limit


def test_fit_opens_an_example_of_each_kind_of_block() -> None:
    """In a view with room for more, the first block of each kind is open, with those that are equal to it."""
    kinds = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU)

    def inner(width: int) -> nn.Module:
        return nn.Sequential(linear(4, width), *(kind() for kind in kinds), linear(width, 4))

    def residual(width: int) -> nn.Module:
        return Net(lambda net, x: x + net.inner(x), inner=inner(width))

    widths = (1, 2, 1, *range(3, 12))
    net = nn.Sequential(*map(residual, widths))
    net.append(nn.Sequential(*(Net(lambda net, x: net.body(x).exp(), body=inner(width)) for width in (21, 22))))
    graph = without(capture_graph(net, X), ["output"])

    def opened(limit: int, depth: int | None = None) -> list[str]:
        view = fit_view(graph, limit, depth)
        parents = {node.parent for node in view.nodes}
        return [
            call.name for call in view.module_calls() if call.id in parents and call.name.endswith(("inner", "body"))
        ]

    assert opened(200)[:4] == ["0.inner", "1.inner", "2.inner", "3.inner"]
    assert opened(80) == ["0.inner", "2.inner", "12.0.body"]
    assert opened(80, depth=2) == []
    closed = len(drawn_nodes(fit_view(graph, 80, 2)))
    assert opened(2 * closed) == []  # the closed view fills half of the room


def backbone() -> nn.Module:
    """Return a network with a residual block."""
    layers = nn.Sequential(linear(4, 9), linear(9, 4))

    def forward(net: Any, x: Tensor) -> Tensor:
        stem: Tensor = net.stem(x)
        return stem.add(net.layers(stem))

    return Net(forward, stem=linear(), layers=layers)


def long_loss() -> nn.Module:
    """Return a loss with a module and eight functions, which differ so that they do not fold."""

    def forward(net: Any, x: Tensor) -> Tensor:
        smooth: Tensor = net.part(x)
        return smooth.exp().sin().cos().tanh().sigmoid().abs().sqrt().mean()

    return Net(forward, part=nn.Softplus())


def test_fit_takes_a_depth() -> None:
    """With a depth no deeper level is opened, even if it would fit."""
    assert [node.name for node in fit_view(capture_graph(stack(1), X), depth=1).module_calls()] == ["0"]


def test_fit_leaves_out_shape_functions_and_unused_results() -> None:
    """By default both are left out and counted; ``shapes`` shows the first ones, and ``all`` both."""

    def forward(_: Net, x: Tensor) -> Tensor:
        x.exp().sum()
        return x.sin().view(2, 2, 2).transpose(0, 1).cos()

    graph = _with_output(Net(forward))
    names = {
        "by default": [node.name for node in fit_view(graph).nodes[1:]],
        "shapes": [node.name for node in fit_view(graph, shapes=True).nodes[1:]],
        "all": [node.name for node in fit_view(graph, all=True).nodes[1:]],
    }
    assert names == {
        "by default": ["input", "sin", "cos", "output"],
        "shapes": ["input", "sin", "view", "transpose", "cos", "output"],
        "all": ["input", "exp", "sum", "sin", "view", "transpose", "cos", "output"],
    }
    assert fit_view(graph).left_out == ("2 shape functions", "2 unused results")
    assert fit_view(graph, shapes=True).left_out == ("2 unused results",)
    assert fit_view(graph, all=True).left_out == ()


def _two_results() -> Graph:
    """Return a training step of four blocks with a residual and a skip output, of which the last residual is unused."""

    def block(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = net.act(x)
        return x + net.res(h), net.skip(h)

    def step(net: Any, x: Tensor) -> None:
        total: Tensor = torch.zeros(())
        for each in net.blocks:
            x, skip = each(x)
            total = total + skip
        total.sum().backward()

    blocks = (Net(block, act=nn.ReLU(), res=linear(), skip=linear()) for _ in range(4))
    return record_step(Net(lambda *_: None, blocks=nn.ModuleList(blocks)), step)


def test_a_last_block_with_an_unused_result_is_folded() -> None:
    """A residual that only the last block does not use is drawn with those of the other blocks, and says so."""
    view = fit_view(_two_results())
    (group,) = (node for node in view.nodes if node.repeats > 1)
    assert (group.repeats, view.left_out) == (4, ())
    assert {node.name: unused(node, view) for node in view.module_calls() if node.depth > 1} == {
        "blocks.0.act": "",
        "blocks.0.res": "blocks.3.res: not used for the loss",
        "blocks.0.skip": "",
    }


def test_a_block_without_a_gradient_stays_apart() -> None:
    """A block that gets no gradient, although its result is used for the loss, is not folded with the others."""
    graph = _two_results()
    graph = replace(graph, unused=replace(graph.unused, parameters=("blocks.1.res.weight", *graph.unused.parameters)))
    assert "blocks.1" in [node.name for node in fit_view(graph).nodes]


def test_an_empty_tensor_is_left_out_with_its_concatenation() -> None:
    """A cache that begins as a tensor without elements is not drawn, nor is the function that appends to it."""
    net = Net(lambda _, x: torch.cat([torch.zeros(0, 4), x.sin()]).cos())
    assert [node.name for node in fit_view(_with_output(net)).nodes[1:]] == ["input", "sin", "cos", "output"]


def test_a_detached_tensor_is_not_a_shape_function() -> None:
    """A function that stops the gradient stays."""
    graph = _with_output(Net(lambda net, x: net.fc(x).detach().view(-1).cos(), fc=nn.Linear(4, 4)))
    assert [node.name for node in fit_view(graph).nodes[1:]] == ["input", "fc", "detach", "cos", "output"]


def test_a_result_that_only_the_last_repetition_does_not_use_is_drawn() -> None:
    """A loop is folded although the state that it computes last is thrown away."""

    def forward(net: Net, x: Tensor) -> Tensor:
        total = x
        for _ in range(6):
            total = total + x.sin()
            x = x.cos().exp()
        return total

    view = fit_view(_with_output(Net(forward)))
    assert [node.repeats for node in view.module_calls()] == [6]
    assert {"sin", "cos", "exp", "add"} <= {node.name for node in view.nodes}


@pytest.mark.parametrize("layers", [4, 6])
def test_a_dense_block_is_one_node(layers: int) -> None:
    """A block of five or more parts, each of which takes the results of all before it, is closed and says so."""

    def block(net: Any, x: Tensor) -> Tensor:
        kept = [x]
        for part in net.children():
            kept.append(part(torch.cat(kept, 1)))
        return torch.cat(kept, 1)

    parts = {f"part{at}": nn.Sequential(nn.Linear(4 * at + 4, 4), nn.ReLU()) for at in range(layers)}
    view = fit_view(_with_output(Net(lambda net, x: net.block(x), block=Net(block, **parts))))
    notes = [node.note for node in view.nodes if node.note]
    assert notes == (["6 parts, each takes all before it"] if layers > 4 else [])
    assert ("part0" in {node.name.rpartition(".")[2] for node in view.nodes}) == (layers == 4)


@pytest.mark.parametrize(("functions", "is_closed"), [(81, True), (80, False)])
def test_a_call_of_many_functions_is_closed(functions: int, is_closed: bool) -> None:
    """A part with more than eighty functions is one node, unless it has at least half of the parameters."""

    def part(net: Any, x: Tensor) -> Tensor:
        x = net.fc(x)
        for number in range(functions):
            x = (torch.sin, torch.cos, torch.tanh)[number * number % 7 % 3](x)
        return x

    small, large = Net(part, fc=linear()), Net(part, fc=linear(), act=nn.ReLU())
    graph = _with_output(nn.Sequential(small, nn.Linear(4, 40), nn.Linear(40, 4)))
    assert ("0.fc" in {node.name for node in fit_view(graph).nodes}) is not is_closed
    assert "0.fc" in {node.name for node in fit_view(graph, depth=3).nodes}
    assert "0.fc" in {node.name for node in fit_view(_with_output(nn.Sequential(large))).nodes}


def test_a_table_for_all_blocks_makes_no_dense_block() -> None:
    """A chain of blocks that all take the result of one other part is drawn as it is."""

    def blocks(net: Any, x: Tensor) -> Tensor:
        table = net.table(x)
        for block in net.blocks:
            x = block(x, table)
        return x

    def block(net: Any, x: Tensor, table: Tensor) -> Tensor:
        return net.fc(x).relu() + table  # type: ignore[no-any-return]  # the attributes are not declared

    parts = nn.ModuleList(Net(block, fc=linear()) for _ in range(4))
    view = fit_view(_with_output(Net(blocks, table=linear(), blocks=parts)), fold=False)
    assert [node.note for node in view.nodes if node.note] == []
    assert sum(node.name.endswith(".fc") for node in view.nodes) == 4


def _with_output(net: nn.Module) -> Graph:
    """Return the graph of a model with its output."""
    return record(net, "net", input_data=(X,))


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


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("make", LARGE.values(), ids=LARGE)
def test_fit_holds_its_limit(make: Callable[[], Graph]) -> None:
    """A view of any model has at most the allowed number of nodes."""
    graph = make()
    for limit in (1, 2, 7, 40, 150):
        view = fit_view(graph, limit)
        assert len(drawn_nodes(view)) <= limit
        assert_sound(view)


class Quantizer(nn.Module):
    """A residual quantizer: each codebook takes what the ones before leave, and a second loop looks the codes up."""

    def __init__(self) -> None:
        super().__init__()
        self.books = nn.ParameterList(torch.randn(5, 4) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        codes = []
        for book in self.books:
            codes.append(torch.cdist(x, book).neg().argmax(-1))
            x = x - nn.functional.embedding(codes[-1], book).tanh()
        total = torch.zeros(())
        for code, book in zip(codes, self.books, strict=True):
            total = total + nn.functional.embedding(code, book).sum().exp()
        return total


def test_tensors_that_two_loops_use_are_drawn_in_each_if_there_is_no_room() -> None:
    """Both loops are folded, and nothing is left out."""
    graph = capture_graph(Quantizer(), X)
    view = fit_view(graph, 40)
    assert [node.repeats for node in view.nodes if node.repeats > 1] == [12, 12]
    assert [node.name for node in view.nodes if node.kind == "parameter"] == ["books.0"] * 2
    assert not [node.name for node in view.nodes if "more" in node.name]
    whole = [node.name for node in fit_view(graph, 200).nodes if node.kind == "parameter"]
    assert len(set(whole)) == len(whole)


def test_fit_of_equal_layers_is_one_layer() -> None:
    """300 equal consecutive layers are one, with their number."""
    assert outline(fit_view(LARGE["300 equal layers"]())) == "input\n0: Linear [300 times] <- input first, 0 ×299 next"


def test_fit_of_gpt2_shows_one_block() -> None:
    """Twelve transformer blocks are drawn as one open block, from the tokens to the loss."""
    view = fit_view(LARGE["GPT-2"]())
    (block_,) = (node for node in view.module_calls() if node.type_name == "GPT2Block")
    assert block_.repeats == 12
    assert {"ln_1", "attn", "ln_2", "mlp"} <= {node.name.rpartition(".")[2] for node in view.children(block_)}
    assert reaches(view, "input.input_ids", "cross_entropy")


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
