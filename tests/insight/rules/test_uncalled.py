"""Tests of the rules of modules that are never called, or no longer."""

from __future__ import annotations

import math

import pytest

from lightning_recorder.graph import Edge, Graph, Node
from tests.insight.records import Values, brief, chain, network, run, trained


def test_an_unused_module() -> None:
    """A module that is never called and never gets a gradient is unused."""
    layers: dict[str, Values] = {"a": {"rms": 1.0}, "head": {"rms": 1.0}}
    parameters: dict[str, Values] = {**network("a", "head"), "extra/weight": {"rms": 0.2, "update_ratio": 0.0}}
    assert brief(run(layers, None, parameters, graph=chain("a", "head"))) == [("warning", "unused-parameter", "extra")]


@pytest.mark.parametrize("loud", [False, True])
def test_experts_that_no_token_reaches(loud: bool) -> None:
    """Uncalled modules beside called ones are a finding of the list; a router with large outputs is their cause."""
    called = ("stem", "layers.0.router", "layers.0.experts.0.up", "layers.0.experts.0.down", "head")
    layers: dict[str, Values] = {name: {"rms": 20.0 if loud and "router" in name else 1.0} for name in called}
    starved = [f"layers.0.experts.{number}.{part}/weight" for number in (1, 2) for part in ("up", "down")]
    parameters: dict[str, Values] = {
        **network(*called),
        **{each: {"rms": 0.2, "update_ratio": 0.0} for each in starved},
    }
    (found,) = run(layers, None, parameters, graph=chain(*called))
    experts = ("layers.0.experts.1", "layers.0.experts.2")
    if loud:
        assert (found.module, found.others, found.consequences) == ("layers.0.router", experts, ("never-chosen",))
    else:
        assert (found.rule, found.module, found.others) == ("never-chosen", *experts[:1], experts[1:])


def test_uncalled_experts_of_one_of_several_layers() -> None:
    """A module that is called in part is not reported as uncalled; a block that is left out as a whole is."""
    parts = [f"experts.{number}.{part}" for number in (0, 1) for part in ("up", "down")]
    layers = {number: [f"layers.{number}.{part}" for part in ("router", *parts)] for number in range(4)}
    left_out = [*layers[1][3:], *layers[3]]
    called = [name for names in layers.values() for name in names if name not in left_out]
    starved: dict[str, Values] = {f"{name}/weight": {"rms": 0.2, "update_ratio": 0.0} for name in left_out}
    found = run({name: {"rms": 1.0} for name in called}, None, {**network(*called), **starved}, graph=chain(*called))
    assert [(each.rule, each.module, each.others) for each in found] == [
        ("never-chosen", "layers.1.experts.1", ()),
        ("never-chosen", "layers.3", ()),
    ]


@pytest.mark.parametrize(("row", "alarm"), [("x.xx.x....x.", False), ("xxxxxxxxxxx.", True)])
def test_a_head_that_is_chosen_rarely(row: str, alarm: bool) -> None:
    """A head without a call is not reported if another one is called so rarely that this may be by chance."""
    called = ("stem", "heads.0", "heads.1")
    layers: dict[str, Values] = {name: {"rms": 1.0} for name in called}
    layers["heads.1"] = {"rms": 1.0, "count": [256.0 if each == "x" else math.nan for each in row]}
    parameters: dict[str, Values] = {**network(*called), "heads.2/weight": {"rms": 0.2, "update_ratio": 0.0}}
    found = run(layers, None, parameters, graph=chain(*called), records=len(row))
    assert brief(found) == [("warning", "never-chosen", "heads.2")] * alarm


def test_an_uncalled_layer_of_another_class_is_no_expert() -> None:
    """A layer of a sequence is unused if no layer of its class is called beside it."""
    called = ("net.0", "net.3")
    types = {"net.0": {"type": "Linear"}, "net.1": {"type": "BatchNorm1d"}, "net.3": {"type": "Linear"}}
    parameters: dict[str, Values] = {**network(*called), "net.1/weight": {"rms": 1.0, "update_ratio": 0.0}}
    (found,) = run(
        {name: {"rms": 1.0} for name in called},
        None,
        parameters,
        graph=chain(*called),
        coverage={"": {"modules": types}},
    )
    assert (found.rule, found.module) == ("unused-parameter", "net.1")


def _experts(*feeds: tuple[int, int]) -> Graph:
    """Return the graph of four experts in a list, with edges between some of them, between a stem and a head."""
    names = ("stem", *(f"experts.{number}" for number in range(4)), "head")
    nodes = [Node(0, "module", "", None, 0, "Net"), Node(1, "input", "input", 0, 1)]
    for number, name in enumerate(names, 1):
        nodes += [Node(2 * number, "module", name, 0, 1, "Linear"), Node(2 * number + 1, "op", "linear", 2 * number, 2)]
    edges = [Edge(1, 3), *(Edge(3, each) for each in (5, 7, 9, 11)), *(Edge(each, 13) for each in (5, 7, 9, 11))]
    return Graph(tuple(nodes), (*edges, *(Edge(5 + 2 * one, 5 + 2 * other) for one, other in feeds)))


@pytest.mark.parametrize(
    ("calls", "feeds", "found"),
    [
        (("x...........", "xx..........", "xxxxxxxxxxxx", "xxxxxxxxxx.x"), (), ("experts.0", ("experts.1",))),
        (("x...........", "xxxxxxxxxxxx", "xxxxxxxxxxxx", "xxxxxxxxxxxx"), (), ("experts.0", ())),
        (("x......x....", "xxxxxxxxxxxx", "xxxxxxxxxxxx", "xxxxxxxxxxxx"), (), None),  # called again
        (("xxxxx.......", "xxxxxxxxxxxx", "xxxxxxxxxxxx", "xxxxxxxxxxxx"), ((0, 1),), None),  # a dropped layer
        (("xxx.........", "...xxxxxxxxx", "...xxxxxxxxx", "...xxxxxxxxx"), (), None),  # another task
        (("x.x.x.......", "x...xx.x..xx", "..x.x.......", "xxxxxxxxxxxx"), (), None),  # few tokens
        (("xxxx.", "xxxxx", "xxxxx", "xxxxx"), (), None),  # too few records
    ],
)
def test_experts_that_no_token_reaches_any_more(
    calls: tuple[str, ...], feeds: tuple[tuple[int, int], ...], found: tuple[str, tuple[str, ...]] | None
) -> None:
    """A member of a list whose members do not feed each other is reported if its calls end, and those of one do not."""
    names = ("stem", *(f"experts.{number}" for number in range(4)), "head")
    counts = {
        f"experts.{number}": [256.0 if each == "x" else math.nan for each in row] for number, row in enumerate(calls)
    }
    layers: dict[str, Values] = {name: {"rms": 1.0, "count": counts.get(name, 256.0)} for name in names}
    parameters = {key: value for name in names for key, value in trained(name).items()}
    for name, each in counts.items():
        parameters[f"{name}/weight.grad"] = {"rms": [0.0 if math.isnan(count) else 1e-3 for count in each]}
    findings = run(layers, None, parameters, graph=_experts(*feeds), records=len(calls[0]))
    assert [(each.rule, each.module, each.others) for each in findings] == (
        [] if found is None else [("never-chosen", *found)]
    )
    if found is not None:
        last = max(row.rindex("x") for row in calls if row.endswith("..."))
        assert findings[0].first_step == 10 * (last + 1)
        assert f"no input after step {10 * last}, in {11 - last} records" in findings[0].verdict


def test_experts_whose_weights_a_function_uses() -> None:
    """An expert that has gradients in the records without a call is not reported."""
    names = ("stem", *(f"experts.{number}" for number in range(4)), "head")
    layers: dict[str, Values] = {name: {"rms": 1.0} for name in names}
    layers["experts.0"] = {"rms": 1.0, "count": [256.0] + 11 * [math.nan]}
    assert run(layers, None, network(*names), graph=_experts(), records=12) == []
