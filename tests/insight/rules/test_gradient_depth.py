"""Tests of the rules about gradients that vanish or explode."""

from __future__ import annotations

import pytest

from lightning_recorder.graph.model import Edge, Graph, Node
from tests.insight.records import Values, chain, run


@pytest.mark.parametrize(("factor", "rule"), [(0.1, "vanishing-gradient"), (3.0, "exploding-gradient"), (0.7, "")])
def test_gradients_by_depth(factor: float, rule: str) -> None:
    """Gradients that change by more than 3.5 decades down, or 2.5 up, towards the input are a finding."""
    names = [f"layer_{letter}" for letter in "abcdefghij"]
    gradients: dict[str, Values] = {name: {"rms": 1e-2 * factor ** (9 - place)} for place, name in enumerate(names)}
    found = run(None, gradients, graph=chain(*names))
    assert [(each.rule, each.module) for each in found] == ([(rule, "layer_a")] if rule else [])


@pytest.mark.parametrize(
    ("small", "together", "rules"),
    [(6e-3, False, []), (1e-5, False, ["loss-imbalance"]), (6e-3, True, ["exploding-gradient"])],
)
def test_a_head_with_a_small_loss_is_no_growth(small: float, together: bool, rules: list[str]) -> None:
    """The gradients of layers before several heads come from the head with the largest one, and grow from there."""
    names = [*(f"layer_{letter}" for letter in "abcdef"), "price", "hidden", "mask"]
    nodes = [Node(0, "module", "", None, 0, "Net"), Node(1, "input", "x", 0, 1)]
    for number, name in enumerate(names, 1):
        nodes += [Node(2 * number, "module", name, 0, 1, "Linear"), Node(2 * number + 1, "op", "f", 2 * number, 2)]
    ends = [(2 * number - 1, 2 * number + 1) for number in range(1, 10)]
    if not together:
        ends[7] = (13, 17)  # from layer_f to the hidden layer of the other head
    gradients: dict[str, Values] = {name: {"rms": 3 * 0.9**place} for place, name in enumerate(names)}
    for name in names[7:]:
        gradients[name] = {"rms": small}
    found = run(None, gradients, graph=Graph(tuple(nodes), tuple(Edge(*each) for each in ends)))
    assert [each.rule for each in found] == rules


def test_a_single_module_that_stops_gradients() -> None:
    """If one module takes most of the gradient away, it is named."""
    names = [f"layer_{letter}" for letter in "abcdefgh"]
    gradients: dict[str, Values] = {
        name: {"rms": (1e-9 if place < 4 else 1e-3) * 1.1**place} for place, name in enumerate(names)
    }
    (found,) = run(None, gradients, graph=chain(*names))
    assert (found.rule, found.module) == ("vanishing-gradient", "layer_e")


@pytest.mark.parametrize(
    ("count", "mean", "module", "words"),
    [
        (256.0, 0.9, "logvar", "between dec and logvar, more than the weight of dec explains"),
        (256.0, 500.0, "dec", "between dec and logvar, more than the weight of dec explains"),
        (1e6, 0.9, "dec", "in dec"),  # the norm of the weight is 250, and 10 times that is more than the growth
    ],
)
def test_a_growth_that_the_weight_does_not_explain(count: float, mean: float, module: str, words: str) -> None:
    """A gradient that a term of the loss adds to one of two inputs of a layer is found at that input."""
    names = ["enc", "hidden", "mean", "logvar", "dec", "act", "out", "last"]
    nodes = [Node(0, "module", "", None, 0, "Net"), Node(1, "input", "x", 0, 1)]
    for number, name in enumerate(names, 1):
        nodes += [Node(2 * number, "module", name, 0, 1, "Linear"), Node(2 * number + 1, "op", "f", 2 * number, 2)]
    ends = [(1, 3), (3, 5), (5, 7), (5, 9), (7, 11), (9, 11), (11, 13), (13, 15), (15, 17)]
    gradients: dict[str, Values] = {name: {"rms": 1.1**-place} for place, name in enumerate(names)}
    for name in ("enc", "hidden", "logvar"):
        gradients[name] = {"rms": 1000.0}
    gradients["mean"] = {"rms": mean}
    parameters = {"dec/weight": {"rms": 0.25, "count": count}}
    found = run(None, gradients, parameters, graph=Graph(tuple(nodes), tuple(Edge(*each) for each in ends)))
    (found_depth,) = [each for each in found if each.rule == "exploding-gradient"]
    assert found_depth.module == module
    assert found_depth.verdict.endswith(f"from the last to the first modules, most of it {words}")
    assert ("term of the loss" in found_depth.why) == ("explains" in words)
