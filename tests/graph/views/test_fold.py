"""The view with folded repetitions: exact results for small models, laws for any model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_recorder.graph import (
    Graph,
    GraphCapture,
    Node,
    capture_graph,
    collapse,
    draw,
    drop_dead_ends,
    fit_view,
    fold_repeats,
    hide,
    to_text,
    without,
)
from lightning_recorder.graph.renderers.labels import shown_dilations, shown_times, size
from lightning_recorder.graph.views.own_tensors import own_tensors
from lightning_recorder.graph.views.wiring import Siblings
from tests.graph.nets import Net, X, bare, linear, scaled, stack
from tests.graph.outline import outline, text
from tests.graph.random_nets import graphs
from tests.graph.random_wirings import wirings
from tests.graph.unfold import same_graph, unfold


def weight_of(graph: Graph, node: Node) -> int:
    """Return the number of recorded nodes that a node of a view represents."""
    total = node.repeats
    for call in graph.ancestors(node):
        total *= call.repeats
    return total


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
    """Consecutive equal blocks become the first, with their number."""
    view = fold_repeats(collapse(bare(stack(12), X)))
    assert outline(view) == text(
        """
        input
        0: Net [12 times]
          0.inner: Sequential
            0.inner.0: Linear <- input first, add ×11 next
            0.inner.1: ReLU <- 0.inner.0 ×12
          add <- input first, add ×11 next, 0.inner.1 ×12
        """
    )


def test_a_parameter_may_start_a_loop() -> None:
    """A parameter that only the first step of a loop takes, as its initial state, stays outside of the loop."""

    def forward(net: Any, x: Tensor) -> Tensor:
        state = net.scale
        for _ in range(4):
            state = torch.tanh(x + state)
        return state  # type: ignore[no-any-return]  # the attributes of a Net are not declared

    graph = without(capture_graph(scaled(forward), X), "output")
    view = fold_repeats(graph)
    assert outline(view, model_tensors=True) == text(
        """
        input
        scale
        (module) [4 times]
          add <- input ×4, scale first, tanh ×3 next
          tanh <- add ×4
        """
    )
    assert same_graph(unfold(view), graph)


@pytest.mark.parametrize(("functions", "rounds"), [(6, 2), (5, 0)])
def test_two_long_steps_of_functions_are_folded(functions: int, rounds: int) -> None:
    """Two steps of at least six functions are one frame. Shorter steps may be alike by chance."""

    def forward(_: Net, x: Tensor) -> Tensor:
        state = x
        for _round in range(2):
            for number in range(functions - 1):
                state = (torch.sin, torch.cos, torch.tanh, torch.exp, torch.neg)[number](state)
            state = state + x
        return state

    graph = capture_graph(Net(forward), X)
    view = fold_repeats(graph)
    assert [node.repeats for node in view.nodes if node.repeats > 1] == [rounds] * (rounds > 0)
    assert same_graph(unfold(view), graph)


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
          layer0.fc: Linear <- input[0] first, mul ×4 next
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
          fc0: Linear <- input first, relu ×3 next
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
        0: Linear [3 times] <- input first, 0 ×2 next
        """
    )


def test_two_layers_are_no_repetition_but_two_blocks_are() -> None:
    """At least three equal layers are folded, or two equal calls, or pairs of calls, that contain others.

    A pair of a block and a layer is not.
    """

    def folded(*parts: nn.Module) -> list[tuple[str, int]]:
        view = fold_repeats(collapse(bare(nn.Sequential(*parts), X)))
        return [(node.name, node.repeats) for node in view.children(view.root) if node.kind == "module"]

    other = [Net(lambda net, x: x * net.fc(x), fc=linear()) for _ in range(2)]
    assert folded(linear(), linear()) == [("0", 1), ("1", 1)]
    one, same = stack(2).children()
    assert folded(one, same) == [("0", 2)]
    assert folded(one, other[0], same, other[1]) == [("", 2)]
    assert folded(one, linear(), same, linear()) == [(name, 1) for name in "0123"]


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
              0.0.inner.0: Linear <- input first first, add next first, add ×4 next
              0.0.inner.1: ReLU <- 0.0.inner.0 ×6
            add <- input first first, add next first, add ×4 next, 0.0.inner.1 ×6
        """
    )
    members = {node.name: node.members for node in view.module_calls()}
    assert members["0"] == ("0", "1")
    assert members["0.0.inner.1"] == tuple(f"{stage}.{block}.inner.1" for stage in (0, 1) for block in (0, 1, 2))


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

    plain = {name: nn.Sequential(linear(), nn.ReLU()) for name in ("a0", "a1", "x0", "x1", "x2")}
    net = Net(forward, a0=plain["a0"], a1=plain["a1"], odd=odd(), x0=plain["x0"], x1=plain["x1"], x2=plain["x2"])
    view = fold_repeats(hide(collapse(bare(net, X)), ("to",)))
    repeats = {node.name: node.repeats for node in view.module_calls() if node.repeats > 1}
    assert repeats == {"a0": 2, "x0": 3}


def test_equal_modules_with_other_names_are_not_folded() -> None:
    """An encoder and a decoder, or a student and a teacher, are two modules of the picture."""
    chain = Net(lambda net, x: net.decoder(net.encoder(x)), encoder=stack(1), decoder=stack(1))
    beside = Net(lambda net, x: net.student(x) - net.teacher(x), student=stack(1), teacher=stack(1))
    for net in (chain, beside):
        view = fold_repeats(collapse(bare(net, X)), 2)
        assert [node.name for node in view.children(view.root) if node.kind == "module"] == list(net._modules)


def test_a_shared_module_is_not_folded_with_its_neighbor() -> None:
    """A module after each layer is drawn as the same each time, although its structure is that of the layers."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for layer in net.layers:
            x = net.shared(layer(x))
        return x

    net = Net(forward, layers=nn.ModuleList(stack(1) for _ in range(6)), shared=stack(1))
    view = fold_repeats(collapse(bare(net, X), 1), 2)
    (frame,) = (node for node in view.nodes[1:] if node.repeats == 6)
    assert [(node.name, node.repeats, node.shared) for node in view.children(frame)] == [
        ("layers.0", 1, False),
        ("shared", 1, True),
    ]


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
    """With its repetitions, a folded view has the same number of nodes and parameters, and it knows all modules."""
    before = graph if whole else without(collapse(graph), ("parameter", "buffer"))
    view = fold_repeats(before, least)
    recorded = [node for node in view.nodes if node.type_name or node.kind != "module"]  # frames have no class
    assert sum(weight_of(view, node) for node in recorded) == len(before.nodes)
    assert sum(weight_of(view, node) * node.parameters for node in view.nodes) == sum(
        node.parameters for node in before.nodes
    )
    names = {name for node in view.module_calls() for name in node.members or (node.name,)}
    assert names - {""} == {node.name for node in before.module_calls()} - {""}


# Different wirings stay visible.


def _wired(kinds: str) -> Graph:
    """Return the graph of blocks that add their input to the result, or the result to itself."""

    def forward(net: Any, x: Tensor, kind: str) -> Tensor:
        y: Tensor = net.fc(x)
        if kind == "-":
            return y - x
        return x - y if kind == "~" else y + (x if kind == "s" else y)

    net = nn.Sequential(*(Net(lambda net, x, k=kind: forward(net, x, k), fc=linear()) for kind in kinds))
    return bare(net, X)


def test_alternating_wirings_stay_apart() -> None:
    """Blocks that alternate between two wirings are not one block; a period of two blocks is a unit."""
    assert outline(fold_repeats(collapse(_wired("sdd")))) == text(
        """
        input
        0: Net
          0.fc: Linear <- input
          add <- 0.fc, input
        1: Net [2 times]
          1.fc: Linear <- add first, add#2 next
          add#2 <- 1.fc ×4
        """
    )
    for times in (2, 3):
        later = f" ×{times - 1}" if times > 2 else ""
        assert outline(fold_repeats(collapse(_wired("sd" * times)))) == text(
            f"""
            input
            (module) [{times} times]
              0: Net
                0.fc: Linear <- input first, add#2{later} next
                add <- 0.fc ×{times}, input first, add#2{later} next
              1: Net
                1.fc: Linear <- add ×{times}
                add#2 <- 1.fc ×{2 * times}
            """
        )


def test_one_different_wiring_stays_apart() -> None:
    """If the last of four blocks is connected differently inside, the first three are folded."""
    assert outline(fold_repeats(collapse(_wired("sssd")))) == text(
        """
        input
        0: Net [3 times]
          0.fc: Linear <- input first, add ×2 next
          add <- 0.fc ×3, input first, add ×2 next
        3: Net
          3.fc: Linear <- add
          add#2 <- 3.fc ×2
        """
    )


def test_the_order_of_arguments_matters() -> None:
    """A block that subtracts its input is not equal to one that subtracts from its input."""
    assert outline(fold_repeats(collapse(_wired("-~-")))) == text(
        """
        input
        0: Net
          0.fc: Linear <- input
          sub <- 0.fc, input
        1: Net
          1.fc: Linear <- sub
          sub#2 <- sub, 1.fc
        2: Net
          2.fc: Linear <- sub#2
          sub#3 <- 2.fc, sub#2
        """
    )


class _Step(nn.Module):
    """An LSTM cell that takes its states in their order, or swapped."""

    def __init__(self, swapped: bool) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 4)
        self.swapped = swapped

    def forward(self, x: Tensor, states: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, c = self.cell(x, states[::-1] if self.swapped else states)
        return h, (h, c)


def _run_steps(net: Any, x: Tensor) -> Tensor:
    states = x.exp(), x.cos()
    for step in net.steps:
        x, states = step(x, states)
    return x


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize(
    ("swapped", "drawn"),
    [
        ("0000", ["steps.0 ×4"]),
        ("0001", ["steps.0 ×3", "steps.3"]),
        ("0101", [" ×2", "steps.0 ×2"]),
    ],
)
def test_which_output_is_taken_matters(swapped: str, drawn: list[str], closed: bool) -> None:
    """A step that takes (c, h) of the step before is not equal to one that takes (h, c)."""
    net = Net(_run_steps, steps=nn.ModuleList(_Step(each == "1") for each in swapped))
    graph = capture_graph(net, X)
    view = fold_repeats(collapse(graph) if closed else graph)
    found = [node for node in view.nodes[1:] if node.kind == "module" and node.type_name != "LSTMCell"]
    assert [node.name + (f" ×{node.repeats}" if node.repeats > 1 else "") for node in found] == drawn


def test_blocks_that_take_the_parts_of_a_list_are_equal() -> None:
    """The steps of a loop over a tensor that is split before take its parts one after the other."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = x.new_zeros(4)
        for part in x.expand(5, 4).unbind(0)[1:]:
            h = net.fc(part) + h
        return h

    assert outline(fold_repeats(collapse(bare(Net(forward, fc=linear()), X[:1])))) == text(
        """
        input
        new_zeros <- input
        expand <- input
        unbind <- expand
        (module) [4 times]
          fc: Linear <- unbind ×4
          add <- fc ×4, new_zeros first, add ×3 next
        """
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: x.transpose(1, 3), lambda x: x.transpose(2, 3)),
        (lambda x: x.movedim(1, 2), lambda x: x.movedim(1, 3)),
        (lambda x: x.swapaxes(1, 2), lambda x: x.swapaxes(1, 3)),
        (lambda x: x.unfold(1, 4, 1).squeeze(1), lambda x: x.unfold(2, 4, 1).squeeze(2)),
        (lambda x: x.roll(1, 2), lambda x: x.roll(2, 2)),
        (lambda x: F.pad(x, (1, 0)), lambda x: F.pad(x, (0, 1))),
        (lambda x: x.triu(0), lambda x: x.triu(1)),
        (lambda x: x.clamp(-1, 1), lambda x: x.clamp(-2, 2)),
        (lambda x: x.add(x, alpha=1), lambda x: x.add(x, alpha=2)),
        (lambda x: x**2, lambda x: x**3),
        (lambda x: x - 1, lambda x: 1 - x),
        (lambda x: x / 2, lambda x: 2 / x),
        (lambda x: F.gumbel_softmax(x, hard=False), lambda x: F.gumbel_softmax(x, hard=True)),
        (lambda x: F.normalize(x, p=1), lambda x: F.normalize(x, p=2)),
        (lambda x: x / x.norm(p=1), lambda x: x / x.norm(p=2)),
        (lambda x: F.hardtanh(x, -1, 1), lambda x: F.hardtanh(x, -2, 2)),
        (lambda x: torch.fft.fft(x, norm="ortho").real, lambda x: torch.fft.fft(x, norm="forward").real),
    ],
)
def test_functions_with_other_settings_stay_apart(
    one: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor]
) -> None:
    """Blocks that compute different things in turn are pairs, and those that compute the same are equal."""

    def repeats(*functions: Callable[[Tensor], Tensor]) -> list[int]:
        blocks = [Net(lambda net, x, f=each: f(net.fc(x).relu())[..., :4], fc=linear()) for each in functions]
        view = fold_repeats(collapse(bare(nn.Sequential(*blocks), torch.rand(2, 4, 4, 4))))
        return [node.repeats for node in view.module_calls() if view[node.parent or 0] is view.root]

    assert repeats(*[one] * 6) == [6]
    assert repeats(*[one, other] * 3) == [3]


def test_functions_with_other_drop_rates_are_equal() -> None:
    """A drop rate may grow with the depth."""
    blocks = [Net(lambda net, x, p=rate: F.dropout(net.fc(x), p), fc=linear()) for rate in (0.1, 0.2, 0.3)]
    assert shown(fold_repeats(collapse(bare(nn.Sequential(*blocks), X)))) == ["0 ×3", "0.fc"]


def test_tied_blocks_stay_apart_from_their_owner() -> None:
    """Blocks whose weight is that of another block say so, and are not folded with others."""

    def tied(*owners: int | None) -> list[tuple[str, int, tuple[str, ...]]]:
        blocks = [Net(lambda net, x: x + net.b(net.a(x)), a=linear(), b=linear()) for _ in owners]
        for block, owner in zip(blocks, owners, strict=True):
            if owner is not None:
                block.b.weight = blocks[owner].b.weight  # type: ignore[union-attr]  # both are layers
        view = fold_repeats(collapse(own_tensors(capture_graph(nn.Sequential(*blocks), X))))
        calls = [node for node in view.module_calls() if node.name.endswith("b")]
        return [(node.name, view[node.parent or 0].repeats, node.tied) for node in calls]

    assert tied(None, 0, 0, 0) == [("0.b", 1, ()), ("1.b", 3, ("0.b.weight",))]
    assert tied(None, None, 0, None, None) == [("0.b", 2, ()), ("2.b", 1, ("0.b.weight",)), ("3.b", 2, ())]


@pytest.mark.parametrize(
    ("owners", "drawn"),
    [
        ((0, 1, 2, 3), [("4", 4, "0…3.fc.weight")]),
        ((3, 2, 1, 0), [("4", 4, "3…0.fc.weight")]),
        ((0, 0, 0, 0), [("4", 4, "0.fc.weight")]),
        ((0, 1, 0, 1), [("4", 2, "0…1.fc.weight")]),  # in a frame for the two pairs
        ((0, 1, 2, 0), [("4", 3, "0…2.fc.weight"), ("7", 1, "0.fc.weight")]),
        ((1, 3, 0, 2), [("4", 1, "1…0.fc.weight"), ("5", 1, "3…2.fc.weight")]),  # pairs in a frame
        ((0, 2, 1, 3), [("4", 1, "0…1.fc.weight"), ("5", 1, "2…3.fc.weight")]),
        ((0, 3, 2, 1), [("4", 1, "0.fc.weight"), ("5", 3, "3…1.fc.weight")]),
        ((0, 0, 3, 1), [("4", 2, "0.fc.weight"), ("6", 1, "3.fc.weight"), ("7", 1, "1.fc.weight")]),
    ],
)
def test_blocks_that_are_tied_to_several_others(owners: tuple[int, ...], drawn: list[tuple[str, int, str]]) -> None:
    """Each block is tied to the same one or to another one, and the first and the last one are named."""
    blocks = [Net(lambda net, x: x + net.fc(x).relu(), fc=linear()) for _ in range(8)]
    for block, owner in zip(blocks[4:], owners, strict=True):
        block.fc.weight = blocks[owner].fc.weight  # type: ignore[union-attr]  # both are layers
    view = fold_repeats(collapse(own_tensors(capture_graph(nn.Sequential(*blocks), X))))
    found = [(view[node.parent or 0], node.tied) for node in view.module_calls() if node.tied]
    assert [(block.name, block.repeats, *tied) for block, tied in found] == drawn


def test_a_layer_that_some_blocks_share_ends_a_repetition() -> None:
    """A block that calls a layer of another block is not equal to blocks with layers of their own."""
    blocks = [Net(lambda net, x: net.fc(x).relu(), fc=linear()) for _ in range(5)]
    blocks[3].fc = blocks[0].fc
    view = fold_repeats(collapse(bare(nn.Sequential(*blocks), X)))
    assert shown(view) == ["0 ×3", "0.fc", "3", "0.fc", "4", "4.fc"]


def test_closed_calls_with_other_wirings_stay_apart() -> None:
    """Closed blocks that are wired differently inside are not folded together."""
    graph = _wired("sdsd")
    view = fold_repeats(collapse(graph, 1), contents=graph)
    assert [(node.name, node.repeats) for node in view.module_calls()] == [(name, 1) for name in "0123"]


def test_mirrored_skips_stay_visible() -> None:
    """Encoders whose results go to different decoders are not folded."""

    def forward(net: Any, x: Tensor) -> Tensor:
        skips = []
        for index in range(4):
            x = getattr(net, f"enc{index}")(x)
            skips.append(x)
        for index in range(4):
            x = getattr(net, f"dec{index}")(torch.cat([x, skips.pop()], 1))
        return x

    encoders = {f"enc{index}": linear() for index in range(4)}
    decoders = {f"dec{index}": linear(8) for index in range(4)}
    view = fold_repeats(collapse(bare(Net(forward, **encoders, **decoders), X)))
    assert outline(view) == text(
        """
        input
        enc0: Linear <- input
        enc1: Linear <- enc0
        enc2: Linear <- enc1
        enc3: Linear <- enc2
        cat <- enc3 ×2
        dec0: Linear <- cat
        cat#2 <- dec0, enc2
        dec1: Linear <- cat#2
        cat#3 <- dec1, enc1
        dec2: Linear <- cat#3
        cat#4 <- dec2, enc0
        dec3: Linear <- cat#4
        """
    )


def test_results_in_between_end_a_repetition() -> None:
    """A repetition ends at a block whose result is used elsewhere as well."""

    def forward(net: Any, x: Tensor) -> Any:
        found = []
        for index, part in enumerate(net.children()):
            x = part(x)
            if index in (2, 6):
                found.append(x.exp())
        return found

    view = fold_repeats(collapse(bare(Net(forward, **{f"fc{index}": linear() for index in range(7)}), X)))
    assert outline(view) == text(
        """
        input
        fc0: Linear [3 times] <- input first, fc0 ×2 next
        exp <- fc0
        fc3: Linear [4 times] <- fc0 first, fc3 ×3 next
        exp#2 <- fc3
        """
    )


# Recurrence.


def _cells(_net: Any, x: Tensor) -> Tensor:
    hidden, results = torch.zeros(2, 4), []
    for _ in range(5):
        hidden = _net.cell(x, hidden)
        results.append(hidden)
    return torch.stack(results)


def test_recurrence_of_a_cell() -> None:
    """A cell in a loop is one cell with edges to its next call, from its first state and to the user of all results."""
    view = fit_view(capture_graph(Net(_cells, cell=nn.GRUCell(4, 4)), X))
    assert outline(view) == text(
        """
        input
        zeros
        cell: GRUCell [5 times] <- input ×5, zeros first, cell ×4 next
        stack <- cell ×5 all
        """
    )
    assert to_text(view) == text(
        """
        Net.forward · 120 parameters
        ├─ input  2×4
        ├─ zeros  2×4  ← nothing
        ├─ cell ×5, same weights  GRUCell · 120 parameters  2×4  ← input, zeros (first), cell (next)
        ├─ stack  5×2×4  ← cell (all)
        └─ output  5×2×4
        """
    )


def test_a_scan_of_functions() -> None:
    """Sixty-four steps of a selective scan are one frame with the state that a step passes to the next."""

    def forward(_: Any, x: Tensor) -> Tensor:
        state, results = torch.zeros(2), []
        for step in range(64):
            state = x[:, step].exp() * state + x[:, step]
            results.append(state.sin())
        return torch.stack(results)

    assert outline(fold_repeats(bare(Net(forward), torch.ones(2, 64)))) == text(
        """
        input
        zeros
        (module) [64 times]
          getitem <- input ×64
          exp <- getitem ×64
          mul <- exp ×64, zeros first, add ×63 next
          getitem#2 <- input ×64
          add <- mul ×64, getitem#2 ×64
          sin <- add ×64
        stack <- sin ×64 all
        """
    )


def test_an_unrolled_recurrent_layer() -> None:
    """An LSTM written with functions has the state and the memory of the step before, and its weights in each step."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 4))

        def forward(self, x: Tensor) -> Tensor:
            hidden = memory = torch.zeros(2, 4)
            for _ in range(12):
                gate, new = F.linear(x + hidden, self.weight).chunk(2, 1)
                memory = gate.sigmoid() * memory + new.tanh()
                hidden = memory.tanh()
            return hidden

    assert outline(fold_repeats(capture_graph(Layer(), X)), model_tensors=True) == text(
        """
        input
        zeros
        (module) [12 times]
          add <- input ×12, zeros first, tanh#2 ×11 next
        weight
          linear <- add ×12, weight ×12
          chunk <- linear ×12
          sigmoid <- chunk ×12
          mul <- sigmoid ×12, zeros first, add#2 ×11 next
          tanh <- chunk ×12
          add#2 <- mul ×12, tanh ×12
          tanh#2 <- add#2 ×12
        """
    )


def test_parameters_of_each_step() -> None:
    """A parameter that only one step uses is in the frame; one that all steps use is outside."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.ParameterList(torch.ones(4, 4) for _ in range(3))
            self.shared = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.own:
                x = F.linear(x, weight) * self.shared
            return x

    view = fold_repeats(capture_graph(Layers(), X))
    (frame,) = (node for node in view.nodes if node.repeats > 1)
    assert [node.name for node in view.children(frame)] == ["own.0", "linear", "mul"]


def test_a_loop_in_a_loop() -> None:
    """The state of each inner layer goes to the same layer in the next step of the outer loop."""

    def forward(net: Any, x: Tensor) -> Tensor:
        states = [torch.zeros(2, 4)] * 4
        for _ in range(3):
            y = x
            for index in range(4):
                y = states[index] = (y + states[index]).tanh()
        return y

    view = fold_repeats(bare(Net(forward), X))
    assert outline(view) == text(
        """
        input
        zeros
        (module) [3 times]
          (module) [4 times]
            add <- input ×3 first, tanh ×9 next, zeros ×4 first, tanh ×8 next same
            tanh <- add ×12
        """
    )


def test_layers_with_their_own_first_states() -> None:
    """Layers in a loop fold if each starts from its own state: each repetition takes the state of the same number."""

    def forward(net: Any, x: Tensor) -> Tensor:
        states = [torch.zeros(2, 4) for _ in range(4)]
        for _ in range(3):
            y = x
            for index in range(4):
                y = states[index] = (y + states[index]).tanh()
        return y

    view = fold_repeats(bare(Net(forward), X))
    assert outline(view) == text(
        """
        input
        zeros [4 times]
        (module) [3 times]
          (module) [4 times]
            add <- input ×3 first, tanh ×9 next, zeros ×4 first each each, tanh ×8 next same
            tanh <- add ×12
        """
    )
    assert [line for line in to_text(view).splitlines() if "add" in line] == [
        "│     ├─ add  2×4  ← input (first of ×4), tanh (next of ×4), zeros (first of ×3, each), tanh (next of ×3)"
    ]


def test_generation_with_a_cache() -> None:
    """The tokens after the first one are a loop with its layers folded inside, which pass their caches on."""

    def layer(net: Any, x: Tensor, cache: Tensor | None) -> Tensor:
        keys: Tensor = net.key(x)
        net.cache = keys if cache is None else torch.cat([cache, keys])
        return torch.add(x, net.value(net.cache).sum(0))

    def forward(net: Any, x: Tensor) -> Tensor:
        for token in range(5):
            x = net.model(x, token)
        return x

    layers = [Net(layer, key=linear(), value=linear()) for _ in range(3)]

    def model(net: Any, x: Tensor, token: int) -> Tensor:
        for each in net.children():
            x = each(x, each.cache if token else None)
        return x

    net = Net(forward, model=Net(model, **{f"layer{number}": each for number, each in enumerate(layers)}))
    assert outline(fold_repeats(collapse(bare(net, X)))) == text(
        """
        input
        model: Net
          model.layer0: Net [3 times]
            model.layer0.key: Linear <- input first, add ×2 next
            model.layer0.value: Linear <- model.layer0.key ×3
            sum <- model.layer0.value ×3
            add <- input first, add ×2 next, sum ×3
        model: Net (call 2) [4 times]
          model.layer0: Net (call 2) [3 times]
            model.layer0.key: Linear (call 2) <- add first first, add#2 ×3 next first, add#2 ×8 next
            cat <- model.layer0.key ×3 first each each, cat ×9 next same, model.layer0.key ×12
            model.layer0.value: Linear (call 2) <- cat ×12
            sum#2 <- model.layer0.value ×12
            add#2 <- add first first, add#2 ×3 next first, add#2 ×8 next, sum#2 ×12
        """
    )


def test_parallel_layers_and_their_functions_stay_apart() -> None:
    """Query, key and value are not folded because each is followed by an equal function."""

    def forward(net: Any, x: Tensor) -> Tensor:
        q, k, v = [part(x) for part in net.children()]
        one, two, three = [each.exp() for each in (q, k, v)]
        product: Tensor = one * two * three
        return product

    view = fold_repeats(collapse(bare(Net(forward, q=linear(), k=linear(), v=linear()), X)))
    assert [node.name for node in view.module_calls()] == ["q", "k", "v"]


def test_a_loop_that_detaches_its_state() -> None:
    """The unused ``detach`` of the last step keeps no step apart, and is no function that the gradient stops at."""

    def recycled(net: Any, x: Tensor) -> Tensor:
        state = torch.zeros_like(x)
        for _ in range(4):
            y = net.fc(x + net.norm(state))
            state = y.detach()
        return y  # type: ignore[no-any-return]  # the attributes are not declared

    view = fit_view(capture_graph(Net(recycled, fc=linear(), norm=nn.LayerNorm(4)), X))
    assert outline(view) == text(
        """
        input
        zeros_like <- input
        (module) [4 times]
          norm: LayerNorm <- zeros_like first, detach ×3 next
          add <- input ×4, norm ×4
          fc: Linear <- add ×4
          detach <- fc ×4
        """
    )


def test_a_state_of_two_steps() -> None:
    """A step that uses the two states before it is one repetition, with the first states of the first two steps."""

    def forward(_: Any, x: Tensor) -> Tensor:
        before, now = x.exp(), x.sin()
        for _ in range(6):
            before, now = now, (before.cos() + now).tanh()
        return now

    view = fold_repeats(bare(Net(forward), X))
    assert outline(view) == text(
        """
        input
        exp <- input
        sin <- input
        (module) [6 times]
          cos <- exp first, sin first next, tanh ×4 next next
          add <- cos ×6, sin first, tanh ×5 next
          tanh <- add ×6
        """
    )
    assert next(line for line in to_text(view).splitlines() if "cos" in line) == (
        "│  ├─ cos  2×4  ← exp (first), sin (second), tanh (next, 2 on)"
    )


# Sizes.


def test_sizes_that_depend_on_the_data() -> None:
    """Blocks whose numbers of rows differ are folded, and show the smallest and the largest number."""

    def forward(net: Any, x: Tensor) -> Tensor:
        result = x
        for rows, expert in zip((1, 3, 2, 2, 1, 3, 3, 2), net.children(), strict=True):
            result = result.index_add(0, torch.arange(rows), expert(x[:rows]))
        return result

    experts = {f"expert{index}": nn.Linear(4, 4) for index in range(8)}
    view = fold_repeats(collapse(bare(Net(forward, **experts), torch.ones(3, 4))))
    (expert,) = view.module_calls()[1:]
    assert (expert.name, str(expert.outputs[0])) == ("expert0", "1…3×4")
    assert {str(edge.tensor) for edge in view.edges if edge.source == expert.id} == {"1…3×4"}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("layers", "repeats"), [(2, [1, 1]), (3, [1, 1, 1]), (6, [3]), (7, [3, 1])])
def test_parts_that_are_taken_in_turn(layers: int, repeats: list[int], reverse: bool) -> None:
    """A coupling layer that keeps the first half of its input is not equal to one that keeps the second half."""

    def keep(first: slice, second: slice) -> Net:
        def forward(net: Any, x: Tensor) -> Tensor:
            kept, changed = x[:, first], x[:, second]
            changed = changed + net.fc(kept)
            return torch.cat([changed, kept] if reverse and first.start else [kept, changed], 1)

        return Net(forward, fc=linear())

    halves = slice(None, 4), slice(4, None)
    net = nn.Sequential(*(keep(*halves[:: -1 if layer % 2 else 1]) for layer in range(layers)))
    view = fold_repeats(collapse(bare(net, torch.ones(2, 8)), 2))
    assert [node.repeats for node in view.children(view.root) if node.kind == "module"] == repeats


@pytest.mark.parametrize(("numbers", "repeats"), [(range(8), [8]), ([0, 1] * 4, [4]), ([0.9, 0.8], [2]), ([3, 3], [2])])
def test_numbers_that_differ(numbers: Sequence[float], repeats: list[int]) -> None:
    """Blocks are folded in pairs if they multiply with two numbers in turn, and alone if each has another number."""
    blocks = (Net(lambda net, x: net.fc(x) * net.number, fc=linear()) for _ in numbers)
    net = nn.Sequential(*blocks)
    for block, number in zip(net, numbers, strict=True):
        block.number = number  # type: ignore[assignment]
    view = fold_repeats(collapse(bare(net, X), 2))
    assert [node.repeats for node in view.children(view.root) if node.kind == "module"] == repeats
    pairs = [node.repeats for node in view.module_calls() if node.name in ("0", "1")]
    assert pairs == ([1, 1] if repeats == [4] else repeats)


def test_sizes_of_weights_keep_layers_apart() -> None:
    """Layers with as many parameters, but other sizes, are not equal."""
    net = nn.Sequential(*(nn.Linear(*sizes, bias=False) for sizes in [(4, 8), (8, 4)] * 2))
    assert [node.repeats for node in fold_repeats(collapse(bare(net, X))).module_calls()] == [1] * 4


# Laws.


@pytest.mark.slow
@settings(max_examples=150)
@given(graph=wirings)
def test_unfolding_gives_back_the_graph(graph: Graph) -> None:
    """A folded graph determines the original graph, with all calls and with the order of all arguments."""
    assert same_graph(unfold(fold_repeats(graph)), graph)


@settings(max_examples=60)
@given(graph=graphs)
def test_unfolding_gives_back_the_model(graph: Graph) -> None:
    """The folded graph of a model determines the recorded graph."""
    assert same_graph(unfold(fold_repeats(graph)), graph)


@pytest.mark.slow
@settings(max_examples=100)
@given(graph=wirings)
def test_folding_twice_changes_nothing(graph: Graph) -> None:
    """Folding a folded graph returns it, and folding is deterministic."""
    view = fold_repeats(graph)
    assert fold_repeats(view) is view
    assert fold_repeats(graph) == view


def test_a_long_loop_needs_few_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of compared nodes grows in proportion to the length of a loop."""
    counts = []
    for rounds in (100, 800):

        def forward(_: Any, x: Tensor, rounds: int = rounds) -> Tensor:
            for _index in range(rounds):
                x = x.exp().tanh() + x
            return x

        compared = 0

        def port(*args: Any, original: Any = Siblings.port) -> Any:
            nonlocal compared
            compared += 1
            return original(*args)

        with monkeypatch.context() as patch:
            patch.setattr(Siblings, "port", port)
            fold_repeats(bare(Net(forward), X))
        counts.append(compared)
    assert counts[1] < 10 * counts[0]


def test_calls_of_one_module_share_their_weights() -> None:
    """A block that is called several times is marked, alone or among others, and a module without parameters is not."""
    block = Net(lambda net, x: net.fc(x).relu(), fc=linear())
    once = fold_repeats(collapse(bare(Net(lambda net, x: net.block(net.block(x)), block=block), X)))
    assert shown(once) == ["block ×2, same weights", "block.fc"]

    def loop(net: Any, x: Tensor) -> Tensor:
        for _ in range(4):
            x = net.fc(x).relu()
        return x

    assert shown(fold_repeats(collapse(bare(Net(loop, fc=linear()), X)))) == ["×4, same weights", "fc"]
    assert shown(fold_repeats(collapse(bare(stack(2), X)))) == ["0 ×2", "0.inner", "0.inner.0", "0.inner.1"]
    quiet = nn.ReLU()
    assert shown(fold_repeats(collapse(bare(nn.Sequential(quiet, quiet, quiet), X)))) == ["0 ×3"]


def test_a_list_of_blocks_that_is_called_twice() -> None:
    """Three blocks that are called one after the other, two times, are two repetitions of three blocks."""
    blocks = stack(3)
    view = fold_repeats(collapse(bare(Net(lambda net, x: net.blocks(net.blocks(x)), blocks=blocks), X)))
    assert shown(view)[:2] == ["blocks ×2, same weights", "blocks.0 ×3"]

    def loop(net: Any, x: Tensor) -> Tensor:
        for _ in range(2):
            for block in net.children():
                x = block(x)
        return x

    net = Net(loop, **{f"block{number}": Net(lambda net, x: net.fc(x).relu(), fc=linear()) for number in range(3)})
    assert shown(fold_repeats(collapse(bare(net, X)))) == ["×2, same weights", "block0 ×3", "block0.fc"]


@pytest.mark.parametrize(
    ("order", "drawn"),
    [
        ("012012", ["×2, same weights", "×3", "layers.0"]),
        ("000111", ["×2", "×3, same weights", "layers.0"]),
        ("012210", ["×3", "layers.0", "×3", "layers.2"]),
        ("012021", ["×3", "layers.0", "layers.0", "layers.2", "layers.1"]),
        ("012102", ["×3", "layers.0", "layers.1", "layers.0", "layers.2"]),
        ("000123456", ["×3, same weights", "layers.0", "×6", "layers.1"]),
        ("012234", ["×3", "layers.0", "layers.2", "layers.3", "layers.4"]),
        ("012301301301", ["×3", "layers.0", "×3, same weights", "layers.3", "layers.0", "layers.1"]),
        ("012345", ["×6", "layers.0"]),
    ],
)
def test_layers_that_are_called_in_two_passes(order: str, drawn: list[str]) -> None:
    """Two passes are one frame only if both call the same layers in the same order."""

    def passes(net: Any, x: Tensor) -> Tensor:
        for place in order:
            x = x + net.layers[int(place)](x)
        return x

    net = Net(passes, layers=nn.ModuleList(linear() for _ in range(7)))
    view = fold_repeats(collapse(bare(net, X)))
    assert shown(view) == drawn
    assert "the same each time" not in "".join(size(node) for node in view.module_calls())


def test_a_layer_inside_several_blocks_shares_its_weights() -> None:
    """A layer that different blocks contain is marked inside the folded block, and the block is not."""
    shared = linear()
    blocks = [Net(lambda net, x: net.own(x) + net.common(x), own=linear(), common=shared) for _ in range(3)]
    view = fold_repeats(collapse(bare(nn.Sequential(*blocks), X)))
    assert shown(view) == ["0 ×3", "0.own", "0.common"]
    assert [size(node) for node in view.module_calls()] == [
        "40 parameters",
        "20 parameters",
        "20 parameters, the same each time",
    ]


def test_a_layer_beside_different_blocks_shares_its_weights() -> None:
    """A module that is the same in each repetition of a row is marked, and the row if all of its modules are."""

    def film(net: Any, x: Tensor) -> Tensor:
        for layer in net.layers:
            x = layer(x) + net.common(x)
        return x

    def functional(net: Any, x: Tensor) -> Tensor:
        for weight in net.weights:
            x = net.common(x) @ weight
        return x

    net = Net(film, layers=nn.ModuleList(linear() for _ in range(3)), common=linear())
    view = fold_repeats(collapse(bare(net, X)))
    assert shown(view) == ["×3", "layers.0", "common"]
    sizes = [size(node) for node in view.module_calls()]
    assert sizes == ["", "20 parameters", "20 parameters, the same each time"]
    same = Net(film, layers=nn.ModuleList([linear()] * 3), common=linear())
    assert shown(fold_repeats(collapse(bare(same, X))))[0] == "×3, same weights"

    weights = nn.ParameterList(nn.Parameter(torch.eye(4)) for _ in range(3))
    net = Net(functional, weights=weights, common=linear())
    assert shown(fold_repeats(collapse(own_tensors(capture_graph(net, X))))) == ["×3", "common"]


def shown(view: Graph) -> list[str]:
    """Return the name and number of each call of a view."""
    return [f"{node.name} {shown_times(node)}".strip() for node in view.module_calls()]


@pytest.mark.parametrize(
    ("frozen", "drawn"),
    [
        ((0,), [("0", 1), ("1", 5)]),
        ((3, 4, 5), [("0", 3), ("3", 3)]),
        ((2,), [("0", 2), ("2", 1), ("3", 3)]),
        (range(6), [("0", 6)]),
    ],
)
def test_frozen_blocks_stay_apart(frozen: Sequence[int], drawn: list[tuple[str, int]]) -> None:
    """Blocks that are trained are not folded with those that are not."""
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(6)), nn.Linear(4, 2))
    for place in frozen:
        net[place].requires_grad_(False)
    x = torch.ones(1, 4)
    with GraphCapture(net, x, scope="training_step") as recording:
        net(x).sum().backward()
    view = draw(recording.graph(), unused=True).view
    blocks = [node for node in view.module_calls() if node.type_name == "Sequential" and node.name]
    assert [(node.name, node.repeats) for node in blocks] == drawn
    assert {node.name for node in blocks if node.note == "frozen"} == {str(frozen[0])}


def test_steps_without_a_gradient_stay_apart() -> None:
    """The steps of a loop that stop the gradient are not folded with those that pass it on."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for step in range(6):
            with torch.set_grad_enabled(step >= 3):
                x = torch.tanh(x * net.scale)
        return x

    net = Net(forward)
    net.scale = nn.Parameter(torch.ones(4))
    x = torch.ones(1, 4)
    with GraphCapture(net, x, scope="training_step") as recording:
        net(x).sum().backward()
    view = fold_repeats(recording.graph())
    assert [node.repeats for node in view.nodes if node.repeats > 1] == [3, 3]
    assert [node.note for node in view.nodes if node.name == "mul"] == ["stops the gradient: no_grad", ""]


def test_settings_that_differ_between_blocks() -> None:
    """A folded box shows the range of the drop rates and factors of its blocks."""

    def block(rate: float) -> nn.Module:
        return Net(lambda net, x: net.drop(net.fc(x)) * (1 + rate), fc=linear(), drop=nn.Dropout(rate))

    graph = capture_graph(nn.Sequential(*(block(place / 10) for place in range(1, 5))), X)
    view = fold_repeats(drop_dead_ends(graph))
    (drop,) = (node for node in view.nodes if node.type_name == "Dropout")
    assert dict(drop.arguments)["p"] == "0.1…0.4"
    (product,) = (node for node in view.nodes if node.name == "mul")
    assert dict(product.arguments)["other"] == "1.1…1.4"


def _dilated(dilation: int, padding: int, *, by_function: bool) -> nn.Module:
    conv = nn.Conv1d(4, 4, 3, padding=0 if by_function else padding, dilation=dilation)
    return Net(lambda net, x: x + net.conv(F.pad(x, (padding, padding)) if by_function else x), conv=conv)


@pytest.mark.parametrize("by_function", [False, True])
def test_dilations_that_differ(by_function: bool) -> None:
    """Blocks that differ in the dilation are drawn once with all dilations, open or closed."""
    blocks = [_dilated(2**at, 2**at, by_function=by_function) for at in range(4)]
    graph = capture_graph(nn.Sequential(*blocks), torch.ones(2, 4, 40))
    for depth in (None, 1):
        view = fit_view(graph, depth=depth)
        (block,) = (node for node in view.nodes if node.type_name == "Net")
        assert (block.repeats, dict(block.arguments)["dilation"]) == (4, "1 | 2 | 4 | 8")
        assert shown_dilations(block, view) == "dilation 1, 2, 4, 8"
    whole = without(graph, ("parameter", "buffer"))
    view = fold_repeats(whole)
    assert same_graph(unfold(view), whole)
    (conv,) = (node for node in view.module_calls() if node.type_name == "Conv1d")
    assert shown_dilations(conv, view) == "dilation 1, 2, 4, 8"


@pytest.mark.parametrize(
    ("columns", "drawn", "sizes"),
    [
        ([4] * 9, ["×9 side by side"], ["12…44 parameters"]),
        ([4] * 8 + [5], ["×8 side by side", ""], ["12…40 parameters", "55 parameters"]),
    ],
)
def test_embeddings_with_other_numbers_of_rows(columns: Sequence[int], drawn: list[str], sizes: list[str]) -> None:
    """Tables of categories are equal if only their numbers of rows differ. Their sizes are shown as a range."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return torch.cat([table(x) for table in net.tables], 1)

    tables = nn.ModuleList(nn.Embedding(3 + row, size) for row, size in enumerate(columns))
    graph = fold_repeats(hide(bare(Net(forward, tables=tables), torch.tensor([0, 1]))))
    calls = [node for node in graph.nodes if node.type_name == "Embedding"]
    assert [shown_times(node) for node in calls] == drawn
    assert [size(node) for node in calls] == sizes
    assert Graph.from_json(graph.to_json()) == graph


def test_a_padding_that_does_not_follow_the_dilation_keeps_blocks_apart() -> None:
    """A convolution that keeps the size is not folded with one that does not."""
    blocks = [_dilated(2, padding, by_function=False) for padding in (2, 2, 2)]
    blocks[1] = nn.Sequential(nn.Conv1d(4, 4, 3, dilation=2), nn.ConstantPad1d(2, 0.0))
    assert [node.repeats for node in bare(nn.Sequential(*blocks), torch.ones(2, 4, 9)).module_calls()] == [1] * 7
    layers = [nn.Conv1d(4, 4, 3, padding=padding, dilation=dilation) for padding, dilation in ((1, 1), (4, 2), (2, 2))]
    view = fold_repeats(collapse(bare(nn.Sequential(*layers), torch.ones(2, 4, 9))), 2)
    assert [(node.name, node.repeats) for node in view.module_calls()] == [("0", 1), ("1", 1), ("2", 1)]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_sum_that_begins_with_zero(reverse: bool) -> None:
    """The first step of a sum adds the number 0, as Python's ``sum`` does, and is folded with the others."""

    def forward(net: Any, x: Tensor) -> Tensor:
        total: Any = 0
        for layer in net.layers:
            x = layer(x)
            total = x.exp() + total if reverse else total + x.exp()
        return total  # type: ignore[no-any-return]

    graph = bare(Net(forward, layers=nn.ModuleList(linear() for _ in range(5))), X)
    view = fold_repeats(collapse(graph))
    (frame,) = (node for node in view.nodes if node.repeats > 1)
    assert [node.name for node in view.children(frame)] == ["layers.0", "exp", "add"]
    assert frame.repeats == 5
    assert same_graph(unfold(fold_repeats(graph)), graph)


@pytest.mark.parametrize(("number", "repeats"), [(2, []), (3, [3])])
def test_many_functions_side_by_side(number: int, repeats: list[int]) -> None:
    """More than eight parallel functions without layers are folded, such as the waves of a position."""

    def forward(net: Any, x: Tensor) -> Tensor:
        waves = [wave(x * 2.0**power) for power in range(number) for wave in (torch.sin, torch.cos)]
        return torch.cat([x, *waves])

    graph = bare(Net(forward), X)
    view = fold_repeats(graph)
    assert [node.repeats for node in view.nodes if node.repeats > 1] == repeats
    assert [node.parallel for node in view.nodes if node.repeats > 1] == [True] * len(repeats)
    assert same_graph(unfold(view), graph)


def test_blocks_that_are_not_registered_are_folded_from_the_first_on() -> None:
    """Blocks that the model does not register are folded, although only the first has no number in its name."""
    blocks = [nn.Sequential(linear(), nn.Tanh()) for _ in range(4)]

    def forward(net: Any, x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
        return net.head(x)  # type: ignore[no-any-return]

    view = fold_repeats(bare(Net(forward, head=linear()), X))
    calls = {node.name: (node.repeats, node.members) for node in view.module_calls() if node.depth == 1}
    assert calls == {
        "Sequential": (4, ("Sequential", "Sequential#2", "Sequential#3", "Sequential#4")),
        "head": (1, ()),
    }
