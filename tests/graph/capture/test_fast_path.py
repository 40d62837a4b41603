"""The usual function call: its nodes and edges are those of the general case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given

from lightning_recorder.graph import Graph, GraphCapture
from lightning_recorder.graph.capture.fast_path import FastPath
from tests.graph.architectures import ARCHITECTURES, Case
from tests.graph.nets import X
from tests.graph.random_nets import Block, Program, programs


def recorded(make: Callable[[], Case]) -> Graph:
    """Return the graph of a forward pass of a new model, with the same random numbers each time."""
    torch.manual_seed(0)
    net, args, kwargs = make()
    with GraphCapture(net, args) as recording:
        recording.add_outputs(net(*args, **kwargs))
    return recording.graph()


def both_ways(make: Callable[[], Case]) -> tuple[Graph, Graph, list[bool]]:
    """Return the graph, the graph without the fast path, and for each attempt whether the fast path recorded it."""
    answers: list[bool] = []
    note = FastPath.note

    def watched(self: FastPath, *call: Any) -> bool:
        answers.append(note(self, *call))
        return answers[-1]

    with patch.object(FastPath, "note", watched):
        fast = recorded(make)
    with patch.object(FastPath, "note", lambda self, *call: False):
        return fast, recorded(make), answers


@given(programs)
def test_random(program: Program) -> None:
    fast, general, _ = both_ways(lambda: (Block(program), (X,), {}))
    assert fast.to_json() == general.to_json()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name: str) -> None:
    fast, general, _ = both_ways(ARCHITECTURES[name])
    assert fast.to_json() == general.to_json()


def test_usual_functions_take_it() -> None:
    """From its second call on, a function is recorded by the fast path."""
    _, _, answers = both_ways(ARCHITECTURES["chain of 30"])
    assert answers == [True] * 29
