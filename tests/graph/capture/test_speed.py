"""The work that a recording does for each function, as numbers of calls: independent of the machine."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_recorder.graph import capture_graph, record
from tests.effort import profiled


class Block(nn.Module):
    """A residual block of tiny functions."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.fc(x))


def _calls(function: Callable[[nn.Module], object], blocks: int) -> int:
    """Return the number of calls of Python functions and of functions in C."""
    net = nn.Sequential(*(Block() for _ in range(blocks)))
    function(net)
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    profiled(lambda: function(net), note)
    return count


def _per_block(function: Callable[[nn.Module], object]) -> float:
    return (_calls(function, 120) - _calls(function, 20)) / 100


X = torch.ones(2, 8)


def test_calls_of_a_capture() -> None:
    """A block of three functions, two modules and two parameters takes at most 525 calls."""
    assert _per_block(lambda net: capture_graph(net, X)) <= 525


def test_calls_of_a_record() -> None:
    """Saving and restoring the state of the modules adds at most 200 calls for each block."""
    added = _per_block(lambda net: record(net, input_data=X)) - _per_block(lambda net: capture_graph(net, X))
    assert added <= 200
