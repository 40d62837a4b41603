"""Tests of the order of calls."""

from __future__ import annotations

import torch
from torch import nn

from lightning_recorder.graph import capture_graph
from lightning_recorder.recordings.call_order import CallOrder
from lightning_recorder.taps import Site


class Shared(nn.Module):
    """Three layers that share an activation; the last one was defined first."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.b, self.a = (nn.Linear(2, 2) for _ in range(3))
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.a, self.b, self.c):
            x = self.act(layer(x))
        return x


def sites(*names: str) -> list[Site]:
    return [Site(name, "out") for name in names]


def test_the_order_is_that_of_the_calls() -> None:
    """Sites are sorted by the time of their last call; the backward pass has the reverse order."""
    order = CallOrder(capture_graph(Shared(), torch.ones(1, 2)))
    assert order.sort(sites("c", "b", "a", "act", "")) == sites("a", "b", "c", "act", "")
    assert order.sort(sites("c", "b", "a", ""), is_backward=True) == sites("", "c", "b", "a")


def test_a_shared_module_is_the_first_only_if_nothing_before_differs() -> None:
    """A shared module follows from the layer that differs, unless it is changed and called before that layer."""
    graph = capture_graph(Shared(), torch.ones(1, 2))
    same, changed = CallOrder(graph), CallOrder(graph, ["act"])
    act, b = Site("act", "out"), Site("b", "out")
    assert (same.first(sites("b", "c", "act"), sites("a")), changed.first(sites("b", "c", "act"), sites("a"))) == (
        b,
        act,
    )
    for order in (same, changed):
        assert order.first(sites("act"), sites("a", "b", "c")) == act
    assert same.first([b, act], sites("a", "c"), is_backward=True) == b
    assert changed.first([b, act], sites("a", "c"), is_backward=True) == act
    assert changed.first(sites("a", "b", "act"), []) == Site("a", "out")


def test_a_shared_dropout_may_be_the_cause() -> None:
    """A dropout draws random numbers, so it is blamed for its call before the layer that differs."""
    net = Shared()
    net.act = nn.Dropout()  # type: ignore[assignment]  # another activation
    order = CallOrder(capture_graph(net, torch.ones(1, 2)))
    assert order.first(sites("b", "c", "act"), sites("a")) == Site("act", "out")


def test_calls_that_are_kept_apart_have_their_own_time() -> None:
    """A path with the number of a call is ordered by that call, and the path without one by the first call."""
    order = CallOrder(capture_graph(Shared(), torch.ones(1, 2)))
    calls = [Site("act", path) for path in ("out", "out#2", "out#3")]
    a, b, c = sites("a", "b", "c")
    found = [a, calls[0], b, calls[1], c, calls[2]]
    assert order.sort([*calls, c, b, a]) == found
    assert order.first([b, calls[1], c, calls[2]], [a, calls[0]]) == b
    assert order.first([calls[1], c, calls[2]], [a, calls[0], b]) == calls[1]
