"""Tests of the rules that compare equal modules, records over time, or training with validation."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_recorder.graph import capture_graph
from lightning_recorder.graph.model import Edge, Graph, Node
from lightning_recorder.insight.rules import comparisons
from lightning_recorder.reductions import Histogram
from tests.insight.records import Examination, Values, brief, chain, network, record, run, trained


@pytest.mark.parametrize(("place", "factor", "alarm"), [(2, 10, True), (2, 5, False), (5, 10, False), (5, 30, True)])
def test_unlike_siblings(place: int, factor: float, alarm: bool) -> None:
    """A block is compared with the others: 8 × their median is too much, 24 × for the first and the last."""
    names = [f"blocks.{number}.fc" for number in range(6)]
    layers: dict[str, Values] = {name: {"rms": 0.1} for name in names}
    layers[names[place]] = {"rms": 0.1 * factor}
    found = run({**layers, "head": {"rms": 1.0}}, graph=chain(*names, "head"))
    assert [each.module for each in found if each.rule == "unlike-siblings"] == [names[place]] * alarm


@pytest.mark.parametrize(
    ("ratios", "rate", "gradients", "words"),
    [
        ([1e-3] * 4 + [0.0] * 4, 0.0, 8, "(learning rate 0)"),
        ([1e-3] * 4 + [0.0] * 4, 1e-3, 4, "(it has no gradient since)"),
        ([1e-3] * 4 + [math.nan] * 4, math.nan, 4, "(it is frozen since)"),
        ([1e-3] * 5 + [0.0] * 3, 0.0, 8, ""),  # too few records
        ([1e-3, 0.0, 1e-3, 1e-3] + [0.0] * 4, 1e-3, 8, ""),  # a block that is left out by chance
        ([1e-3] * 2 + [0.0] * 6, 1e-3, 8, ""),
    ],
)
def test_a_weight_that_stops(ratios: list[float], rate: float, gradients: int, words: str) -> None:
    """A weight that moves at first and no longer does is found if all equal ones still move."""
    names = [f"blocks.{number}.fc" for number in range(6)]
    parameters = network(*names)
    rates = [1e-3] * 4 + [rate] * 4
    parameters["blocks.3.fc/weight"] = {
        **parameters["blocks.3.fc/weight"],
        "update_ratio": ratios,
        "learning_rate": rates,
    }
    parameters["blocks.3.fc/weight.grad"] = {
        **parameters["blocks.3.fc/weight.grad"],
        "rms": [1e-3] * gradients + [math.nan] * (8 - gradients),
    }
    found = [each for each in run(None, None, parameters) if each.rule == "stops-moving"]
    if not words:
        assert found == []
        return
    assert [(each.module, each.path, each.first_step) for each in found] == [("blocks.3.fc", "weight", 40)]
    assert found[0].verdict == f"blocks.3.fc.weight does not move from step 40 on, but equal weights do {words}"


def test_weights_that_are_frozen_together_do_not_stop_alone() -> None:
    """If other equal weights have stopped, too, none is named."""
    names = [f"blocks.{number}.fc" for number in range(6)]
    parameters = network(*names)
    for number in (0, 1):
        parameters[f"blocks.{number}.fc/weight"] = {
            **parameters[f"blocks.{number}.fc/weight"],
            "update_ratio": [1e-3] * 4 + [0.0] * 4,
        }
    assert [each for each in run(None, None, parameters) if each.rule == "stops-moving"] == []


@pytest.mark.parametrize(("factor", "alarm"), [(1e-5, True), (1e3, True), (20.0, False), (0.05, False)])
def test_the_gradient_of_one_weight(factor: float, alarm: bool) -> None:
    """A gradient that a hook changes is found although those of the outputs are as usual, if it is far enough away."""
    names = [f"blocks.{number}.fc" for number in range(6)]
    parameters = network(*names)
    for number, name in enumerate(names):
        parameters[f"{name}/weight.grad"] = {
            **parameters[f"{name}/weight.grad"],
            "rms": 1e-3 * (factor if number == 3 else 1.0),
        }
    layers: dict[str, Values] = {name: {"rms": 1.0} for name in names}
    gradients: dict[str, Values] = {name: {"rms": 1e-3} for name in names}
    found = [each for each in run(layers, gradients, parameters, graph=chain(*names)) if each.rule == "unlike-siblings"]
    assert [(each.module, each.path) for each in found] == [("blocks.3.fc", "weight.grad")] * alarm


@pytest.mark.parametrize("factor", [10.0, 20.0])
def test_what_the_first_block_does_wrong_is_not_blamed_on_the_second(factor: float) -> None:
    """If the output of a layer of the second block is unusual, the first block is compared like any other."""
    names = [f"blocks.{number}.{part}" for number in range(12) for part in ("conv", "norm")]
    layers: dict[str, Values] = {name: {"rms": 0.4 if "conv" in name else 1.0} for name in names}
    layers["blocks.0.norm"] = {"rms": factor}
    layers["blocks.1.conv"] = {"rms": 0.4 * factor}
    (found,) = run({**layers, "head": {"rms": 1.0}}, graph=chain(*names, "head"))
    assert (found.module, found.others) == ("blocks.0.norm", ("blocks.1.conv",))


@pytest.mark.parametrize("are_experts", [True, False])
def test_gradients_of_experts_depend_on_their_tokens(are_experts: bool) -> None:
    """Equal layers beside each other are not compared by their gradients, equal layers one after the other are."""
    parts = [f"experts.{number}" for number in range(3)]
    names = [f"blocks.{number}.{part}" for number in range(6) for part in ("router", *parts, "out")]
    nodes = [Node(0, "module", "", None, 0, "Net"), Node(1, "input", "input", 0, 1)]
    for number, name in enumerate(names, 1):
        nodes += [Node(2 * number, "module", name, 0, 1, "Linear"), Node(2 * number + 1, "op", "f", 2 * number, 2)]
    edges = [("", names[0])]
    for number in range(6):
        router, *experts, out = (f"blocks.{number}.{part}" for part in ("router", *parts, "out"))
        following = [f"blocks.{number + 1}.router"] if number < 5 else []
        if are_experts:
            edges += [(router, each) for each in experts] + [(each, out) for each in experts]
        else:
            edges += list(pairwise([router, *experts, out]))
        edges += [(out, each) for each in following]
    places = {name: 2 * number + 1 for number, name in enumerate(names, 1)}
    graph = Graph(tuple(nodes), tuple(Edge(places.get(one, 1), places[other]) for one, other in edges))
    gradients: dict[str, Values] = {name: {"rms": 1e-3} for name in names}
    gradients["blocks.3.experts.1"] = {"rms": 1e-5}
    found = run({name: {"rms": 1.0} for name in names}, gradients, graph=graph)
    assert [each.module for each in found] == ([] if are_experts else ["blocks.3.experts.1"])


@pytest.mark.parametrize("sizes", [(256.0,) * 6, (256.0, 64.0, 256.0, 16.0, 256.0, 256.0)])
def test_gradients_of_experts_of_the_model_itself(sizes: tuple[float, ...]) -> None:
    """Parallel modules in a list of the model are experts if they get parts of a batch, and towers if they get all."""
    names = ["stem", *(f"net.experts.{number}" for number in range(6)), "head"]
    nodes = chain(*names).nodes
    experts = range(5, 17, 2)
    edges = [Edge(1, 3), *(Edge(3, each) for each in experts), *(Edge(each, 17) for each in experts)]
    gradients: dict[str, Values] = {name: {"rms": 1e-3, "count": 256.0} for name in names}
    gradients["net.experts.3"] = {"rms": 1e-5, "count": 256.0}
    layers: dict[str, Values] = {name: {"rms": 1.0} for name in names}
    layers |= {f"net.experts.{number}": {"rms": 1.0, "count": size} for number, size in enumerate(sizes)}
    found = run(layers, gradients, graph=Graph(nodes, tuple(edges)))
    assert [each.module for each in found] == ["net.experts.3"] * (len(set(sizes)) == 1)


def test_the_updates_of_siblings_are_in_the_order_of_the_blocks() -> None:
    """Only the first and the last block may differ more than the others."""
    names = [f"blocks.{number}.fc" for number in range(24)]
    for place, sick in enumerate(names):
        found = run(None, None, network(*names, **{sick: trained(sick, update=2.5e-5, ratio=1e-4)}))
        assert [each.module for each in found] == [sick] * (0 < place < 23)


def test_the_forward_pass_comes_before_the_gradients_of_siblings() -> None:
    """A layer with an unusual output is named, and not those before it, whose gradients are a consequence."""
    names = [f"blocks.{number}.{part}" for number in range(6) for part in ("norm", "fc", "out")]
    layers: dict[str, Values] = {name: {"rms": 0.1} for name in names}
    gradients: dict[str, Values] = {name: {"rms": 1e-3} for name in names}
    for part, factor in (("norm", 1e-3), ("fc", 1e-2)):
        gradients[f"blocks.3.{part}"] = {"rms": 1e-3 * factor}
    (found,) = run(layers, gradients, graph=chain(*names))
    assert (found.module, found.others) == ("blocks.3.fc", ("blocks.3.norm",))
    layers["blocks.3.out"] = {"rms": 1e-3}
    (found,) = run(layers, gradients, graph=chain(*names))
    assert (found.module, found.others) == ("blocks.3.out", ("blocks.3.fc", "blocks.3.norm"))
    assert found.verdict.startswith("the rms of the output of blocks.3.out is 0.001")


@pytest.mark.parametrize(
    ("path", "first", "usual", "words"),
    [
        ("bias", 5.0, 0.1, "the rms of the vector of blocks.3.fc.bias is 5 at step 0, 50 × the median of 5 equal"),
        ("bias", 3.0, 0.1, ""),  # vectors of pretrained models differ
        ("bias", 5.0, 0.0, "the rms of the vector of blocks.3.fc.bias is 5 at step 0, and 0 in 5 equal modules"),
        ("weight", 0.0, 0.1, "the rms of the weight of blocks.3.fc is 0 at step 0, and 0.1 to 0.1 in 5 equal modules"),
        ("weight", 0.0, 0.0, ""),  # all begin at zero
    ],
)
def test_parameters_that_begin_in_another_way(path: str, first: float, usual: float, words: str) -> None:
    """The first record of each parameter is compared, which is its initialization."""
    names = [f"blocks.{number}.fc" for number in range(6)]
    shapes = {(name, path): (16, 16) if path == "weight" else (16,) for name in names}
    values: dict[str, Values] = {
        f"{name}/{path}": {"rms": [first if name == names[3] else usual, *(0.2 for _ in range(7))]} for name in names
    }
    grads: dict[str, Values] = {f"{name}/{path}.grad": {"rms": 1e-3} for name in names}
    found = run(None, None, values | grads, shapes=shapes, graph=chain(*names))
    assert brief(found) == [("warning", "unlike-siblings", "blocks.3.fc")] * bool(words)
    assert all(each.verdict.startswith(words) for each in found)


@pytest.mark.parametrize(
    ("later", "last", "records"), [([0.2] * 7, 0, 1), ([0.005, *[0.3] * 6], 10, 2), ([0.001] * 7, 70, 8)]
)
def test_how_long_a_parameter_is_unlike_the_others(later: list[float], last: int, records: int) -> None:
    """The finding about an initial value ends with the first record in which the parameter is within 8 ×."""
    names = [f"blocks.{number}.fc" for number in range(6)]
    sick = {"blocks.3.fc/weight": {"rms": [0.001, *later]}}
    values: dict[str, Values] = {f"{name}/weight": {"rms": 0.2} for name in names}
    (found,) = (each for each in run(None, None, values | sick, graph=chain(*names)) if each.rule == "unlike-siblings")
    assert found.verdict.startswith("the rms of the weight of blocks.3.fc is 0.001 at step 0, 0.005 × the median")
    assert (found.first_step, found.last_step, found.records) == (0, last, records)


def test_blocks_of_several_classes_are_not_siblings() -> None:
    """One layer of attention among others of another class has other neighbors."""
    names = [f"blocks.{number}.norm" for number in range(8)]
    blocks = [Node(100 + place, "module", f"blocks.{place}", 0, 1, "Block") for place in range(8)]
    layers: dict[str, Values] = {name: {"rms": 0.1} for name in names}
    layers[names[4]] = {"rms": 2.0}  # too small for a jump in scale
    for kind, modules in (("Block", [names[4]]), ("Attention", [])):
        others = (replace(each, type_name=kind) if each.name == "blocks.4" else each for each in blocks)
        graph = chain(*names)
        found = run(layers, graph=replace(graph, nodes=(*graph.nodes, *others)))
        assert [each.module for each in found if each.rule == "unlike-siblings"] == modules


@pytest.mark.parametrize(("stem", "alarm"), [(1.0, True), (0.02, False)])
def test_a_small_stream_makes_the_first_block_unlike_the_others(stem: float, alarm: bool) -> None:
    """Without a norm, the first block of a network whose embedding is small has small outputs."""
    names = [f"blocks.{number}.fc" for number in range(8)]
    layers: dict[str, Values] = {"stem": {"rms": stem}, **{name: {"rms": 1.0} for name in names}}
    layers[names[0]] = {"rms": 0.005}
    found = run(layers, graph=chain("stem", *names))
    assert [each.module for each in found if each.rule == "unlike-siblings"] == [names[0]] * alarm


def test_what_a_block_computes_comes_before_a_step_of_the_gradient() -> None:
    """The block whose output is too large is named, and not the one after it, where the gradient seems to change."""
    names = [f"blocks.{place}.fc" for place in range(8)]
    gradients: dict[str, Values] = {name: {"rms": 0.04 if place < 4 else 1e-3} for place, name in enumerate(names)}
    layers: dict[str, Values] = {name: {"rms": 1.0} for name in names}
    assert brief(run(layers, gradients, graph=chain(*names))) == [("warning", "gradient-step", "blocks.4")]
    for sick in (3, 4):
        odd: dict[str, Values] = {**layers, names[sick]: {"rms": 40.0, "std": 1.0}}
        found = run(odd, gradients, graph=chain(*names))
        assert brief(found) == [("warning", "unlike-siblings", names[sick])]


@pytest.mark.parametrize("of_gradients", [False, True])
@pytest.mark.parametrize(
    ("sizes", "skips", "alarm"),
    [
        ([2.0] * 6, False, {True, False}),
        ([3.5] * 3, False, {True, False}),
        ([3.5] * 3, True, {False}),
        ([1.7] * 5 + [40.0], False, set()),
    ],
)
def test_what_is_a_trend(sizes: list[float], skips: bool, alarm: set[bool], of_gradients: bool) -> None:
    """A jump in one block is no trend, and neither are gradients that take the skip connections of a U-Net."""
    rms = [0.1 * math.prod(sizes[:place]) for place in range(len(sizes) + 1)]
    names = [f"blocks.{place}.fc" for place in range(len(rms))]
    layers: dict[str, Values] = {name: {"rms": each} for name, each in zip(names, rms, strict=True)}
    before = [f"down.{place}" for place in range(len(names))]
    graph = chain(*before, *names)
    ends = (
        [2 * len(before) + 1 - 2 * place for place in range(len(names))],
        [2 * len(before) + 3 + 2 * place for place in range(len(names))],
    )
    edges = tuple(Edge(*pair) for pair in zip(*ends, strict=True)) if skips else ()
    graph = replace(graph, edges=(*graph.edges, *edges))
    layers |= {name: {"rms": 1.0} for name in before}
    found = run(None if of_gradients else layers, layers if of_gradients else None, graph=graph)
    assert ("block-trend" in [each.rule for each in found]) == (of_gradients in alarm)


def test_a_trend_over_blocks() -> None:
    """A statistic that doubles from each of six blocks to the next is a finding about the blocks."""
    names = [f"blocks.{number}.fc" for number in range(6)]
    (found,) = run({name: {"rms": 0.1 * 2.0**place} for place, name in enumerate(names)}, graph=chain(*names))
    assert (found.rule, found.module) == ("block-trend", "blocks.5")
    assert found.others == tuple(f"blocks.{number}" for number in range(5))


@pytest.mark.parametrize(
    ("growth", "found"),
    [
        ([1, 40], [("blocks.2", "grows 40-fold")]),
        ([1 / 40, 1, 1], [("blocks.1", "shrinks 40-fold")]),
        ([1, 1, 10], []),
        ([10, 40, 10], []),
        ([40], []),
        ([1, 40, 1 / 40, 1], []),
    ],
)
def test_a_gradient_that_changes_in_one_block(growth: list[float], found: list[tuple[str, str]]) -> None:
    """A gradient that grows or shrinks on its way back through one of several blocks is a finding about that block."""
    rms = [1e-3 * math.prod(growth[place:]) for place in range(len(growth) + 1)]
    gradients: dict[str, Values] = {
        f"blocks.{place}.{name}": {"rms": each} for place, each in enumerate(rms) for name in ("norm", "fc")
    }
    layers: dict[str, Values] = {name: {"rms": 1.0} for name in gradients}
    rules = run(layers, gradients, graph=chain(*gradients, norm="LayerNorm"))
    steps = [each for each in rules if each.rule == "gradient-step"]
    assert [each.module for each in steps] == [module for module, _ in found]
    for each, (module, words) in zip(steps, found, strict=True):
        assert each is rules[0]
        assert words in each.verdict
        before = f"blocks.{int(module[-1]) - 1}"
        assert f" back through {module} or the end of {before}: " in each.verdict
        assert each.verdict.endswith(f"at {before}.fc")


@pytest.mark.parametrize(
    ("rms", "named"),
    [
        ([8.0] * 5 + [1.0] * 5, "blocks.5"),
        ([1.0] * 5 + [8.0] * 5, "blocks.5"),
        ([8.0] * 3 + [1.0] * 3, ""),  # few blocks
        ([8.0] + [1.0] * 9, ""),  # the first block
        ([8.0] * 9 + [1.0], ""),  # the last block
        ([16.0] * 3 + [4.0] * 2 + [1.0] * 5, ""),  # two steps
        ([[8.0] * 7 + [1.5]] * 5 + [1.0] * 5, ""),  # not in every record
        ([[8.0, math.nan] * 4] * 5 + [[math.nan, 1.0] * 4] * 5, ""),  # never in the same record
        ([1.5**place * (8.0 if place < 5 else 1.0) for place in range(10)], ""),  # a trend
    ],
)
def test_a_lone_step_among_many_blocks(rms: list[Any], named: str) -> None:
    """With eight or more blocks, a smaller step between two inner ones is a finding if it is the only one."""
    gradients: dict[str, Values] = {f"blocks.{place}.fc": {"rms": each} for place, each in enumerate(rms)}
    layers: dict[str, Values] = {name: {"rms": 1.0} for name in gradients}
    found = run(layers, gradients, graph=chain(*gradients))
    assert [each.module for each in found if each.rule == "gradient-step"] == [named] * bool(named)


@pytest.mark.parametrize(
    ("first", "rules"),
    [(40.0, ["gradient-step"]), (1.6, ["gradient-step"]), (1.4, []), (math.nan, ["gradient-step"])],
)
def test_growth_in_the_first_block_is_there_from_the_start(first: float, rules: list[str]) -> None:
    """A first block that learns to write a large residual stream is no step: its growth is not in the first record."""
    gradients: dict[str, Values] = {f"blocks.{place}.fc": {"rms": 1.0} for place in range(4)}
    gradients["blocks.0.fc"] = {"rms": [first] + [40.0] * 9}
    layers: dict[str, Values] = {name: {"rms": 1.0} for name in gradients}
    found = run(layers, gradients, graph=chain(*gradients))
    assert [each.rule for each in found if each.rule == "gradient-step"] == rules


@pytest.mark.parametrize(
    ("factors", "began", "first"),
    [
        ([40.0] * 8, 3, "gradient-step"),
        ([40.0] * 8, 1, "saturation"),  # at the second record, so perhaps from the beginning on
        ([1.0] * 3 + [40.0] * 5, 3, "saturation"),
    ],
)
def test_a_saturation_that_begins_later_is_an_effect_of_a_step(factors: list[float], began: int, first: str) -> None:
    """A step of the gradient that was there before a saturation began is the cause of it, not its consequence."""
    names = [f"blocks.{place}.fc" for place in range(10)]
    gradients: dict[str, Values] = {
        name: {"rms": [factor if place < 5 else 1.0 for factor in factors]} for place, name in enumerate(names)
    }
    layers: dict[str, Values] = {name: {"rms": 1.0} for name in names}
    layers["act"] = {"rms": [0.5] * began + [0.98] * (8 - began)}
    values = np.full(100, 0.98)
    edges = np.array([-1.0, -0.95, 0.0, 0.95, 1.0])
    ends = Histogram(edges, np.array([0, 0, 0, 100]), 0.98, 0.98, values.sum(), (values**2).sum())
    graph = chain(*names, "act", "head", act="Tanh")
    (found,) = run({**layers, "head": {"rms": 1.0}}, gradients, graph=graph, histograms={("act", "out"): ends})
    assert (found.rule, found.consequences) == (first, ("saturation" if first == "gradient-step" else "gradient-step",))


def stream(blocks: int) -> Graph:
    """Return the graph of residual blocks, each with a layer ``fc`` whose output is added to its input."""
    nodes = [Node(0, "module", "", None, 0, "Net"), Node(1, "input", "input", 0, 1)]
    nodes += [Node(2, "module", "stem", 0, 1, "Linear"), Node(3, "op", "linear", 2, 2)]
    edges, before = [Edge(1, 3)], 3
    for place in range(blocks):
        number = 10 * (place + 1)
        nodes += [
            Node(number, "module", f"blocks.{place}.norm", 0, 1, "LayerNorm"),
            Node(number + 1, "op", "n", number, 2),
        ]
        nodes += [Node(number + 2, "module", f"blocks.{place}.fc", 0, 1, "Linear")]
        nodes += [Node(number + 3, "op", "linear", number + 2, 2), Node(number + 4, "op", "add", 0, 1)]
        edges += [Edge(before, number + 1), Edge(number + 1, number + 3), Edge(number + 3, number + 4)]
        edges += [Edge(before, number + 4)]
        before = number + 4
    return Graph(tuple(nodes), tuple(edges))


@pytest.mark.parametrize(
    ("stem", "size", "words"),
    [
        (4e-2, 1.0, "grows 40-fold"),
        (2.5e-5, 1.0, "shrinks 40-fold"),
        (5e-3, 1.0, ""),
        (4e-2, 0.02, ""),  # the normalization divides by the small size of the embedding
        (4.0, 0.02, "grows 4e+03-fold"),
    ],
)
def test_a_gradient_that_changes_in_the_first_block(stem: float, size: float, words: str) -> None:
    """The gradient before the first residual block is compared with that behind it."""
    names = [f"blocks.{place}.{name}" for place in range(4) for name in ("norm", "fc")]
    gradients: dict[str, Values] = {"stem": {"rms": stem}, **{name: {"rms": 1e-3} for name in names}}
    layers: dict[str, Values] = {"stem": {"rms": size}, **{name: {"rms": 1.0} for name in names}}
    found = run(layers, gradients, graph=stream(4))
    assert brief(found) == [("warning", "gradient-step", "blocks.0")] * bool(words)
    assert all(words in each.verdict and each.verdict.endswith("at stem") for each in found)
    assert all("residual connection" in each.why for each in found)


@pytest.mark.parametrize(("block", "named"), [(None, "blocks.2"), (1, "blocks.1"), (2, "blocks.2")])
def test_the_code_of_blocks_tells_which_one_is_wrong(block: int | None, named: str) -> None:
    """If the operations of one of two blocks differ from those of all others, the gradient changes there."""
    graph = chain(*(f"blocks.{place}.fc" for place in range(5)))
    blocks = [Node(100 + place, "module", f"blocks.{place}", 0, 1, "Block") for place in range(5)]
    ops = [Node(200 + place, "op", "add", 100 + place, 2) for place in range(5)]
    ops += [] if block is None else [Node(300, "op", "mul", 100 + block, 2, arguments=(("other", "30"),))]
    graph = replace(graph, nodes=(*graph.nodes, *blocks, *ops))
    gradients: dict[str, Values] = {f"blocks.{place}.fc": {"rms": 30.0 if place < 2 else 1.0} for place in range(5)}
    layers: dict[str, Values] = {name: {"rms": 1.0} for name in gradients}
    assert brief(run(layers, gradients, graph=graph)) == [("warning", "gradient-step", named)]


@pytest.mark.parametrize("kinds", ["LLLLLL", "LTLTLT"])
def test_layers_of_a_sequence_are_compared_with_those_of_their_class(kinds: str) -> None:
    """The gradient of a linear layer before a saturated tanh is no smaller than usual among linear layers."""
    names = [f"net.{number}" for number in range(6)]
    types = {str(number): {"L": "Linear", "T": "Tanh"}[kind] for number, kind in enumerate(kinds)}
    gradients: dict[str, Values] = {name: {"rms": 1e-5} for name in names}
    gradients["net.3"] = {"rms": 1e-3}
    found = run({name: {} for name in names}, gradients, graph=chain(*names, **types))
    rules = [each.rule for each in found]
    assert ("unlike-siblings" in rules or "gradient-step" in rules) == (kinds == "LLLLLL")


@pytest.mark.parametrize("is_net_of_one_class", [True, False])
def test_layers_of_several_classes_are_no_equal_blocks(is_net_of_one_class: bool) -> None:
    """Gradients may differ between a layer, ReLU and dropout. Without a sum, no residual connection is named."""
    kinds = ("Linear", "Linear", "Linear") if is_net_of_one_class else ("Linear", "ReLU", "Dropout")
    names = [f"encoder.{place}" for place in range(3)]
    graph = chain(*names, "norm", **dict(zip("012", kinds, strict=True)), norm="BatchNorm1d")
    gradients: dict[str, Values] = {name: {"rms": 1.0 if name == "encoder.0" else 40.0} for name in (*names, "norm")}
    found = [each for each in run(None, gradients, graph=graph) if each.rule == "gradient-step"]
    assert [each.module for each in found] == ["encoder.1"] * is_net_of_one_class
    for each in found:
        assert " back through encoder.1 or what is between encoder.0 and it: " in each.verdict
        assert "residual" not in each.why + each.next


def test_parallel_heads_may_have_other_gradients() -> None:
    """Modules that do not feed each other, such as heads with losses of different weights, are no steps of a chain."""
    heads = [f"heads.{place}" for place in range(3)]
    nodes = [Node(0, "module", "", None, 0, "Net"), Node(1, "input", "input", 0, 1)]
    for number, name in enumerate(heads, 1):
        nodes += [Node(2 * number, "module", name, 0, 1, "Linear"), Node(2 * number + 1, "op", "linear", 2 * number, 2)]
    graph = Graph(tuple(nodes), tuple(Edge(1, node.id) for node in nodes if node.kind == "op"))
    gradients: dict[str, Values] = {name: {"rms": 1e-3 if name == "heads.2" else 1.0} for name in heads}
    assert run({name: {"rms": 1.0} for name in heads}, gradients, graph=graph) == []
    assert [each.rule for each in run(None, gradients, graph=chain(*heads))] == ["gradient-step"]


@pytest.mark.parametrize(("kind", "ratio", "alarm"), [("BatchNorm1d", 1.5, 1), ("Linear", 1.5, 0), ("Linear", 2.5, 1)])
def test_training_differs_from_validation(kind: str, ratio: float, alarm: int) -> None:
    """The first module whose output differs between training and validation is named."""
    layers: dict[str, Values] = {name: {"rms": 3.0} for name in ("a", "norm", "b")}
    other: dict[str, Values] = {"a": {"rms": 3.0}, "norm": {"rms": 3 * ratio}, "b": {"rms": 3 * ratio}}
    found = run(layers, validation=other, graph=chain("a", "norm", "b", norm=kind))
    assert brief(found) == [("warning", "train-differs", "norm")] * alarm


@pytest.mark.parametrize(("kind", "is_known"), [("Linear", True), ("Conv2d", True), ("BatchNorm1d", False)])
def test_data_that_differ_from_validation(kind: str, is_known: bool) -> None:
    """If the first layer does not depend on the mode, the data differ."""
    other: dict[str, Values] = {"a": {"rms": 5.0}, "b": {"rms": 5.0}}
    (found,) = run({"a": {"rms": 1.0}, "b": {"rms": 1.0}}, validation=other, graph=chain("a", "b", a=kind))
    assert found.verdict.endswith(": its inputs differ") == is_known
    assert found.why.startswith("The data of validation are processed in another way") == is_known


def test_other_rows_of_an_embedding() -> None:
    """Validation data may look up other rows of an embedding."""
    layers: dict[str, Values] = {"a": {"rms": 1.0}, "b": {"rms": 1.0}}
    for kind, rules in (("Linear", ["train-differs"]), ("Embedding", [])):
        found = run(layers, validation={"a": {"rms": 3.0}, "b": {"rms": 1.0}}, graph=chain("a", "b", a=kind))
        assert [each.rule for each in found] == rules


def test_a_loss_differs_from_that_of_the_validation() -> None:
    """A module that returns a scalar is a loss, which overfitting makes smaller in training."""
    layers: dict[str, Values] = {"a": {"rms": 1.0}, "loss": {"rms": 0.1}}
    found = run(
        layers,
        validation={**layers, "loss": {"rms": 1.0}},
        graph=chain("a", "loss", loss="MSELoss"),
        shapes={("loss", "out"): ()},
    )
    assert found == []


def test_a_sudden_change() -> None:
    """An output that changes more than eightfold against four records, and stays so, is a finding from that step on."""
    layers: dict[str, Values] = {"a": {"rms": [1.0] * 5 + [9.0] * 3}, "b": {"rms": 1.0}}
    (found,) = run(layers, graph=chain("a", "b"))
    assert (found.rule, found.module, found.first_step) == ("sudden-change", "a", 50)
    layers["a"] = {"rms": [1.0] * 5 + [9.0] + [1.0] * 2}
    assert run(layers, graph=chain("a", "b")) == []
    # As a branch that begins near zero grows.
    layers["a"] = {"rms": [1.7e-6, 4.7e-6, 1.5e-5, 4.5e-5, 3.8e-4, 4e-4, 4e-4, 4e-4]}
    assert run(layers, graph=chain("a", "b")) == []


SIZE = st.sampled_from([0.0, 1e-320, 0.125, 1.0, 1.5, 8.0, 9.0, 200.0, math.inf, math.nan])
RUNS = st.lists(st.tuples(SIZE, st.integers(1, 5)), max_size=5)
SIZES = RUNS.map(lambda runs: [size for size, times in runs for _ in range(times)])


def first_change(sizes: list[float], before: int, lasting: int, factor: float) -> int | None:
    """Return the first place from which on all sizes are larger, or all are smaller, than those before it.

    None if the sizes before have changed as much, up to a factor of four.
    """
    for at in range(before, len(sizes) - lasting + 1):
        past, now = sizes[at - before : at], sizes[at:]
        if min(now) > factor * max(past) > 0 or 0 < factor * max(now) < min(past) or max(now) == 0 < min(past):
            if not all(0 < each < math.inf for each in (*past, now[0])):
                return at
            changes = [abs(math.log(other) - math.log(one)) for one, other in pairwise([*past, now[0]])]
            is_sudden = changes[-1] > max(changes[:-1]) + math.log(4)
            return at if is_sudden else None
    return None


@given(st.lists(SIZES, min_size=1, max_size=3))
@example([[0.0] * 4 + [1.0] * 2])
@example([[1.0] * 4 + [8.0] * 2])
@example([[0.125, 1.0, 1.0, 1.0, 9.0, 9.0]])
def test_sudden_changes_are_found_as_defined(sizes: list[list[float]]) -> None:
    """The first lasting change of each module is found, whatever is missing in the records of others."""
    rule = comparisons.sudden_change
    examination = Examination()
    for step in range(max(map(len, sizes))):
        seen = {(f"m{place}", "out"): {"rms": each[step]} for place, each in enumerate(sizes) if step < len(each)}
        examination.add(record("activations", step, seen))
    with np.errstate(all="ignore"):
        found = {each.module: each.first_step for each in rule.examine(examination.evidence())}
    expected = {}
    for place, each in enumerate(sizes):
        steps = [step for step, size in enumerate(each) if not math.isnan(size)]
        at = first_change(
            [each[step] for step in steps], 4, int(rule.thresholds["persistence"]), rule.thresholds["factor"]
        )
        if at is not None:
            expected[f"m{place}"] = steps[at]
    assert found == expected


@pytest.mark.parametrize(
    ("earlier", "loss", "modules"),
    [(0.1, 1.0, ["b"]), (1.0, 1.0, []), (1.0, 3.0, ["b"])],
    ids=["twice", "once", "worse"],
)
def test_one_validation_is_not_enough(earlier: float, loss: float, modules: list[str]) -> None:
    """Statistics may lag in one validation; a second one, or a validation loss that is worse, confirms the finding."""
    layers: dict[str, Values] = {"a": {"rms": 1.0}, "b": {"rms": 1.0}, "loss": {"mean": 1.0}}
    there: dict[str, Values] = {
        "a": {"rms": 1.0},
        "b": {"rms": [1.0] * 6 + [earlier, 0.1]},
        "loss": {"mean": [1.0] * 7 + [loss]},
    }
    shapes: dict[tuple[str, str], tuple[int, ...]] = {("loss", "out"): ()}
    found = run(layers, validation=there, graph=chain("a", "b", "loss"), shapes=shapes)
    assert [each.module for each in found if each.rule == "train-differs"] == modules


@pytest.mark.parametrize(("first", "second", "modules"), [(3.0, 3.0, ["a"]), (1.0, 3.0, [])])
def test_an_input_that_differs_in_the_only_validation(first: float, second: float, modules: list[str]) -> None:
    """One validation is enough for a layer that takes the input, which does not depend on the training."""
    examination = Examination(chain("a", "b"))
    for row in range(8):
        examination.add(record("activations", row * 10, {(name, "out"): {"rms": 1.0} for name in "ab"}))
    sites = {("a", "out"): {"rms": first}, ("b", "out"): {"rms": second}}
    examination.add(record("activations", 70, sites, stage="validate"))
    assert [each.module for each in examination.findings() if each.rule == "train-differs"] == modules


@pytest.mark.parametrize(("act", "why"), [(nn.Sigmoid, "derivative"), (nn.ReLU, "wrong factor")])
def test_gradients_that_shrink_through_sigmoids(act: type[nn.Module], why: str) -> None:
    """The sigmoid between all layers of a chain is named as the cause."""
    net = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), act()) for _ in range(6)], nn.Linear(4, 1))
    graph = capture_graph(net, torch.ones(2, 4))
    gradients: dict[str, Values] = {f"{place}": {"rms": 4.0**place} for place in range(6)}
    (found,) = (each for each in run(None, gradients, graph=graph) if each.rule == "block-trend")
    assert why in found.why
    assert found.verdict.endswith("with a sigmoid between all of them") == (act is nn.Sigmoid)


class Unrolled(nn.Module):
    """Six steps of a function with the same weight or with one of their own."""

    def __init__(self, weights: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.eye(4) for _ in range(weights)])

    def forward(self, x: Tensor) -> Tensor:
        for step in range(6):
            x = torch.tanh(x @ self.weights[step % len(self.weights)])
        return x


@pytest.mark.parametrize(("weights", "alarm"), [(6, True), (1, False)])
def test_steps_of_a_recurrence_are_no_blocks(weights: int, alarm: bool) -> None:
    """Gradients that shrink through calls with weights of their own are a finding; through time they are not."""
    # Functions behind the last layer would be those of the loss.
    graph = capture_graph(nn.Sequential(Unrolled(weights), nn.Linear(4, 1)), torch.ones(2, 4))
    names = ["0.tanh", *(f"0.tanh#{number}" for number in range(2, 7))]
    gradients: dict[str, Values] = {name: {"rms": 4.0**place} for place, name in enumerate(names)}
    found = [each.rule for each in run(None, gradients, graph=graph) if each.rule == "block-trend"]
    assert found == ["block-trend"] * alarm
