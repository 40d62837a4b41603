"""Random small models, for laws that hold whatever a model does."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_recorder.graph import Graph, GraphCapture
from tests.graph.nets import X

__all__ = ["graphs"]

_FUNCTIONS = (torch.exp, torch.tanh, lambda x: x.view(2, 4), lambda x: x.t().t(), lambda x: x.detach())

_Step = tuple[str, int, int]
_Program = tuple[tuple[_Step, ...], tuple[Any, ...]]


class _Block(nn.Module):
    """Computes tensors from earlier ones, step by step, and gives back the last."""

    def __init__(self, program: _Program) -> None:
        super().__init__()
        self.steps, inner = program
        self.weight = nn.Parameter(torch.ones(4))
        self.parts = nn.ModuleList(map(_Block, inner))

    def forward(self, x: Tensor, lent: Tensor | None = None) -> Tensor:
        values = [x if lent is None else x * lent]
        for kind, one, other in _unrolled(self.steps):
            left, right = values[-1 - one % len(values)], values[-1 - other % len(values)]
            if kind == "function":
                values.append(_FUNCTIONS[other % len(_FUNCTIONS)](left))
            elif kind == "sum":
                values.append(left + right)
            elif kind == "weight":
                values.append(left * self.weight)
            elif not self.parts:
                values.append(torch.zeros(4) + left)
            else:
                part = self.parts[other % len(self.parts)]
                values.append(part(left, self.weight) if kind == "lend" else part(left))
        return values[-1]


def _unrolled(steps: tuple[_Step, ...]) -> list[_Step]:
    """The steps with the last few of them done again where it says so."""
    done: list[_Step] = []
    for kind, one, other in steps:
        done += done[-1 - one % 3 :] * (1 + other % 4) if kind == "again" else [(kind, one, other)]
    return done


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(("function", "sum", "weight", "call", "call", "lend", "again")),
        st.integers(0, 7),
        st.integers(0, 7),
    ),
    max_size=6,
).map(tuple)


def _recorded(program: _Program) -> Graph:
    net = _Block(program)
    with GraphCapture(net, X) as recording:
        out = net(X)
        if out.requires_grad:
            out.sum().backward()
    return recording.graph()


graphs: st.SearchStrategy[Graph] = st.recursive(
    st.tuples(_STEPS, st.just(())),
    lambda inner: st.tuples(_STEPS, st.lists(inner, min_size=1, max_size=2).map(tuple)),
    max_leaves=4,
).map(_recorded)
"""Graphs of models with shared modules, residual connections, loops, views, and parameters lent to submodules."""
