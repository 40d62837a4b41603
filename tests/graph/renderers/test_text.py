"""The text tree, line by line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given
from torch import Tensor, nn

from lightning_recorder.graph import Graph, Node, TextRenderer, capture_graph, fit_view, to_text
from tests.graph.nets import Net, X, linear
from tests.graph.outline import text
from tests.graph.random_nets import graphs
from tests.graph.sketch import HOSTILE, UNPRINTABLE, Sketch


def test_a_line_for_each_node() -> None:
    """A line has the name, a module's class and size or the kind of a tensor, and the shapes of the outputs."""
    sketch = Sketch(parameters=1_234_567, scope="training_step")
    x = sketch.add("input", "batch.x")
    fc = sketch.call("fc", "Linear", x, parameters=1_200_000, shapes=[(2, 3)])
    two = sketch.add("op", "max", fc, shapes=[(2,), (2,)])
    three = sketch.add("op", "split", two, shapes=[(), (1,), (1,)])
    loss = sketch.add("op", "mse_loss", three, shapes=[()])
    sketch.add("output", "output", loss, shapes=[()])
    backward = sketch.add("backward", "backward", loss, shapes=[])
    sketch.add("optimizer", "SGD", backward, shapes=[])
    assert to_text(sketch.graph()) == text(
        """
        Net.training_step · 1.23 M parameters
        ├─ batch.x  input  2×4
        ├─ fc  Linear · 1.2 M parameters  2×3
        ├─ max  [2], [2]
        ├─ split  scalar, [1], …
        ├─ mse_loss  scalar
        ├─ output  scalar
        ├─ backward  ← mse_loss
        └─ SGD  optimizer
        """
    )


def test_rails() -> None:
    """A rail connects a call to its next sibling, past its contents; the last sibling has none."""
    sketch = Sketch()
    one = sketch.call("a", "A")
    two = sketch.call("a.b", "B", inside=one)
    first = sketch.add("op", "f", inside=two)
    last = sketch.add("op", "g", first, inside=two)
    three = sketch.call("c", "C")
    four = sketch.call("c.d", "D", inside=three)
    sketch.add("op", "h", last, inside=four)
    assert to_text(sketch.graph()) == text(
        """
        Net.forward
        ├─ a  A  2×4
        │  └─ b  B  2×4
        │     ├─ f  2×4  ← nothing
        │     └─ g  2×4
        └─ c  C  2×4
           └─ d  D  2×4
              └─ h  2×4
        """
    )


def test_only_what_does_not_follow_has_an_arrow() -> None:
    """A node whose only input is the result of the preceding node has no arrow; any other lists all of its inputs."""
    sketch = Sketch()
    x, y = sketch.add("input", "x"), sketch.add("input", "y")
    fc = sketch.call("fc", "Linear", x)
    relu = sketch.add("op", "relu", fc)
    add = sketch.add("op", "add", relu, y)
    sketch.add("op", "mul", (add, 2))
    assert to_text(sketch.graph()) == text(
        """
        Net.forward
        ├─ x  input  2×4
        ├─ y  input  2×4
        ├─ fc  Linear  2×4  ← x
        ├─ relu  2×4
        ├─ add  2×4  ← relu, y
        └─ mul  2×4  ← add ×2
        """
    )


def test_what_is_taken_from_a_call_has_its_name() -> None:
    """A tensor from inside a call is named by the call, as seen from its user."""
    sketch = Sketch()
    x = sketch.add("input", "x")
    call = sketch.call("encoder", "Encoder")
    inner = sketch.call("encoder.block", "Block", inside=call)
    one = sketch.add("op", "exp", x, inside=inner)
    two = sketch.add("op", "tanh", one, inside=inner)
    sketch.add("op", "add", two, one, x, inside=call)
    sketch.add("op", "cat", two, x)
    assert to_text(sketch.graph()) == text(
        """
        Net.forward
        ├─ x  input  2×4
        ├─ encoder  Encoder  2×4
        │  ├─ block  Block  2×4
        │  │  ├─ exp  2×4
        │  │  └─ tanh  2×4
        │  └─ add  2×4  ← block ×2, x
        └─ cat  2×4  ← encoder, x
        """
    )


def test_first_in_a_call() -> None:
    """The first node of a call takes the result of the node before the call, or lists its inputs."""
    sketch = Sketch()
    x = sketch.add("input", "x")
    exp = sketch.add("op", "exp", x)
    for name, source in (("a", exp), ("b", x)):
        outer = sketch.call(name, "Outer")
        inner = sketch.call(f"{name}.0", "Inner", inside=outer)
        sketch.add("op", "relu", source, inside=inner)
    assert to_text(sketch.graph()).splitlines()[5::3] == [
        "│     └─ relu  2×4",
        "      └─ relu  2×4  ← x",
    ]


def test_calls_and_repeats() -> None:
    """A second call has its number; a folded node has its number of repetitions and shows if they are parallel."""
    sketch = Sketch()
    act = sketch.call("act", "ReLU", sketch.add("input", "x"))
    block = sketch.call("h.0", "Block", repeats=12)
    fc = sketch.call("h.0.fc", "Linear", act, inside=block)
    sketch.call("act", "ReLU", fc, call=2)
    sketch.call("heads.0", "Head", fc, repeats=3, parallel=True)
    assert to_text(sketch.graph()) == text(
        """
        Net.forward
        ├─ x  input  2×4
        ├─ act  ReLU  2×4
        ├─ h.0 ×12  Block  2×4
        │  └─ fc  Linear  2×4
        ├─ act (call 2)  ReLU  2×4
        └─ heads.0 ×3 side by side  Head  2×4  ← h.0
        """
    )


def test_equal_names_in_sight_are_numbered() -> None:
    """Functions with an equal name are numbered anew in each call; names that are not visible can be reused."""
    sketch = Sketch()
    x = sketch.add("input", "x")
    one = sketch.add("op", "add", x)
    for name in ("a", "b"):
        call = sketch.call(name, "Part")
        sketch.add("op", "relu", sketch.add("op", "add", one, inside=call), x, inside=call)
    two = sketch.add("op", "add", x)
    sketch.add("op", "cat", one, two)
    assert to_text(sketch.graph()) == text(
        """
        Net.forward
        ├─ x  input  2×4
        ├─ add  2×4
        ├─ a  Part  2×4
        │  ├─ add#2  2×4
        │  └─ relu  2×4  ← add#2, x
        ├─ b  Part  2×4
        │  ├─ add#2  2×4  ← add
        │  └─ relu  2×4  ← add#2, x
        ├─ add#2  2×4  ← x
        └─ cat  2×4  ← add, add#2
        """
    )


def test_a_function_named_like_its_module() -> None:
    """A function may have the name of its call, since the call cannot be an input of its contents."""
    sketch = Sketch()
    call = sketch.call("relu", "ReLU")
    sketch.add("op", "relu", sketch.add("op", "relu", inside=call), inside=call)
    assert to_text(sketch.graph()).splitlines()[2:] == ["   ├─ relu  2×4  ← nothing", "   └─ relu#2  2×4"]


def test_modules_are_named_so_that_one_is_meant() -> None:
    """A module is named by its dotted name if an enclosing call contains the same name, or if its name is a number."""
    sketch = Sketch()
    norm = sketch.call("norm", "Norm", sketch.add("input", "x"))
    call = sketch.call("body", "Sequential")
    inner = sketch.call("body.norm", "Norm", norm, inside=call)
    first = sketch.call("body.0", "Linear", inner, inside=call)
    second = sketch.call("body.1", "Linear", first, inside=call)
    sketch.add("op", "cat", norm, inner, first, second, inside=call)
    assert to_text(sketch.graph()).splitlines()[-4:] == [
        "   ├─ norm  Norm  2×4",
        "   ├─ 0  Linear  2×4",
        "   ├─ 1  Linear  2×4",
        "   └─ cat  2×4  ← norm, body.norm, body.0, body.1",
    ]


def test_a_frame_without_a_name() -> None:
    """The frame of repeated siblings has only a number, and its contents are referenced by their own names."""
    sketch = Sketch()
    x = sketch.add("input", "x")
    frame = sketch.call("", "", repeats=3, shapes=[])
    conv = sketch.call("conv", "Conv2d", x, inside=frame)
    relu = sketch.add("op", "relu", conv, inside=frame)
    last = sketch.add("op", "exp", relu)
    sketch.add("op", "mul", last, relu)
    assert to_text(sketch.graph()) == text(
        """
        Net.forward
        ├─ x  input  2×4
        ├─ ×3
        │  ├─ conv  Conv2d  2×4
        │  └─ relu  2×4
        ├─ exp  2×4
        └─ mul  2×4  ← exp, relu
        """
    )


def test_a_call_without_a_name() -> None:
    """A closed call without a name, such as a closed frame, can be referenced by its kind."""
    sketch = Sketch()
    x = sketch.add("input", "x")
    call = sketch.call("", "", x, repeats=3)
    one = sketch.add("op", "exp", call)
    sketch.add("op", "add", one, call)
    assert to_text(sketch.graph()).splitlines()[2:] == [
        "├─ module ×3  2×4",
        "├─ exp  2×4",
        "└─ add  2×4  ← exp, module",
    ]


def test_an_edge_into_an_open_call() -> None:
    """An edge into an open call is shown in the line of the call."""
    sketch = Sketch()
    x, y = sketch.add("input", "x"), sketch.add("input", "y")
    call = sketch.call("fc", "Linear", x)
    sketch.add("op", "linear", y, inside=call)
    assert to_text(sketch.graph()).splitlines()[3:] == ["└─ fc  Linear  2×4  ← x", "   └─ linear  2×4"]


def test_a_name_like_a_number() -> None:
    """A name that looks like a numbered one is distinguished from it."""
    sketch = Sketch()
    one = sketch.add("op", "a#1", sketch.add("input", "x"))
    two = sketch.add("op", "a", one)
    sketch.add("op", "a#1", two, one)
    assert [line.split()[1] for line in to_text(sketch.graph()).splitlines()[2:]] == ["a#1", "a", "a#1#2"]


def test_parameters() -> None:
    """A tensor of the model is in the call of its owner, without the owner's name."""
    net = capture_graph(nn.Sequential(linear()), X)
    assert to_text(net).splitlines()[2:6] == [
        "├─ 0  Linear · 20 parameters  2×4",
        "│  ├─ weight  parameter  4×4",
        "│  ├─ bias  parameter  [4]",
        "│  └─ linear  2×4  ← input, weight, bias",
    ]


def test_failed_nodes_are_marked() -> None:
    """Failed nodes and the calls around them start with a cross."""
    sketch = Sketch()
    call = sketch.call("fc", "Linear", inside=0, shapes=[], failed=True)
    sketch.add("op", "linear", sketch.add("input", "x"), inside=call, shapes=[], failed=True)
    assert to_text(sketch.graph()).splitlines()[1:3] == ["├─ ✗ fc  Linear", "│  └─ ✗ linear  ← x"]


def test_many_sources() -> None:
    """Only the first twelve of more than twelve sources are listed."""
    sketch = Sketch()
    sources = [sketch.add("input", f"x{index}") for index in range(40)]
    sketch.add("op", "cat", *sources)
    last = to_text(sketch.graph()).splitlines()[-1]
    assert last == f"└─ cat  2×4  ← {', '.join(f'x{index}' for index in range(12))}, … 28 more"


def test_a_long_name_is_shortened() -> None:
    """A name of more than 60 characters is cut in the middle."""
    sketch = Sketch()
    sketch.add("op", "a" * 200 + "b" * 200, sketch.add("input", "x"))
    assert to_text(sketch.graph()).splitlines()[-1] == f"└─ {'a' * 30}…{'b' * 30}  2×4"


def test_a_graph_of_nothing() -> None:
    """The tree of a model without calls is its title."""
    assert to_text(Graph((Node(0, "module", "", None, 0, type_name="Net"),), ())) == "Net.forward"


# Unusual names.


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name)[:30])
def test_unusual_names_are_shown_as_they_are(name: str) -> None:
    """A printable name is shown literally, in its line and where it is referenced."""
    sketch = Sketch()
    one = sketch.add("op", name, sketch.add("input", "x"))
    sketch.add("op", "add", one, one - 1)
    assert to_text(sketch.graph()).splitlines()[2:] == [f"├─ {name}  2×4", f"└─ add  2×4  ← {name}, x"]


@pytest.mark.parametrize("name", UNPRINTABLE, ids=ascii)
def test_nothing_reaches_the_terminal_but_text(name: str) -> None:
    """No name of a model, module, class, function or tensor breaks a line, moves the cursor or colors the screen."""
    sketch = Sketch(name, scope=name)
    call = sketch.call(name, name)
    x = sketch.add("input", name, inside=call)
    one = sketch.add("op", name, x, inside=call, failed=True)
    sketch.call(f"{name}.{name}", name, one, x, inside=call, repeats=2)
    shown = to_text(sketch.graph())
    lines = shown.split("\n")
    assert all(line.isprintable() for line in lines)
    assert len(lines) == len(sketch.nodes)
    assert "\N{REPLACEMENT CHARACTER}" in lines[-1]
    shown.encode("utf-8")


# Laws for any model.


@given(graphs)
def test_each_node_has_one_line(graph: Graph) -> None:
    """There is a line for every node, in the order of the tree, indented by the calls around it."""
    for view in (graph, fit_view(graph)):
        lines = TextRenderer(view).render()
        assert len(lines) == len(view.nodes)
        depths = sorted(len(list(view.ancestors(node))) for node in view.nodes)
        assert sorted((len(line) - len(line.lstrip("│├└─ "))) // 3 for line in lines) == depths


def test_gpt2_is_readable() -> None:
    """A view of GPT-2 with its 12 layers has fewer than 60 lines, none wider than a terminal of 100 characters."""
    torch.manual_seed(0)
    net = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=20, n_positions=8, n_embd=12, n_layer=12, n_head=2))
    lines = to_text(fit_view(capture_graph(net, torch.tensor([[1, 2]])))).splitlines()
    assert len(lines) < 60
    assert max(map(len, lines)) < 100
    blocks = [line for line in lines if "GPT2Block" in line]
    assert blocks == ["│  ├─ h.0 ×12  GPT2Block · 1884 parameters  1×2×12"]
    residual = [line for line in lines if " add" in line and "attn" in line]
    assert len(residual) == 1


def test_residual_block() -> None:
    """In a captured residual block, the sum lists the block and the skip connection."""
    net = Net(lambda net, x: x + net.inner(x), inner=nn.Sequential(linear(), nn.ReLU()))
    assert to_text(fit_view(capture_graph(net, X))) == text(
        """
        Net.forward · 20 parameters
        ├─ input  2×4
        ├─ inner  Sequential · 20 parameters  2×4
        │  ├─ 0  Linear · 20 parameters  2×4
        │  └─ 1  ReLU  2×4
        ├─ add  2×4  ← input, inner
        └─ output  2×4
        """
    )


def test_loops_in_a_loop() -> None:
    """Tensors that go to the next step of an outer and of an inner loop are kept apart, each with its loop."""

    def forward(net: Any, x: Tensor) -> Tensor:
        states = [torch.zeros(2, 4)] * 3
        for step in range(5):
            value = x[step]
            for number, cell in enumerate(net.children()):
                value = states[number] = cell(value, states[number])
        return value

    net = Net(forward, **{f"cell{number}": nn.GRUCell(4, 4) for number in range(3)})
    shown = to_text(fit_view(capture_graph(net, torch.ones(5, 2, 4))))
    assert [line.split("← ")[1] for line in shown.splitlines() if "GRUCell" in line] == [
        "input (first of ×3), cell0 (next of ×3), zeros (first of ×5), cell0 (next of ×5)"
    ]


def test_loops_of_equal_length_in_each_other() -> None:
    """If two loops in each other have equally many steps, they are told apart as the inner and the outer one."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + 1
            for _ in range(3):
                x = net.layer(x.sin()) + x
        return x

    shown = to_text(fit_view(capture_graph(Net(forward, layer=linear()), X)))
    assert [line.split("← ")[1] for line in shown.splitlines() if "sin" in line and "←" in line] == [
        "add (first), add#2 (next of inner ×3)"
    ]


def test_two_loops_after_each_other() -> None:
    """Nodes inside the frames of loops, which have no names, have names of their own."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for _ in range(4):
            x = net.one(x).relu() + 1
        y = x
        for _ in range(5):
            x = net.two(x).relu() + 1
        return x + y

    assert (
        to_text(fit_view(capture_graph(Net(forward, one=linear(), two=linear()), X))).strip()
        == """
Net.forward · 40 parameters
├─ input  2×4
├─ ×4, same weights
│  ├─ one  Linear · 20 parameters  2×4  ← input (first), add (next)
│  ├─ relu  2×4
│  └─ add  2×4
├─ ×5, same weights
│  ├─ two  Linear · 20 parameters  2×4  ← add (first), add#2 (next)
│  ├─ relu#2  2×4
│  └─ add#2  2×4
├─ add#3  2×4  ← add#2, add
└─ output  2×4
""".strip()
    )
