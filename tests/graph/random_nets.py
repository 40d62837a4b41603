"""Random small models for laws that hold for any model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_recorder.graph import Graph, GraphCapture
from tests.graph.nets import X

__all__ = ["Block", "Program", "graphs", "programs"]

_FUNCTIONS = (torch.exp, torch.tanh, lambda x: x.view(2, 4), lambda x: x.t().t(), lambda x: x.detach())

_Step = tuple[str, int, int]
Program = tuple[tuple[_Step, ...], tuple[Any, ...]]
"""The steps of a block, and the programs of the blocks inside it."""


class Block(nn.Module):
    """Computes tensors from earlier ones, step by step, and returns the last.

    Args:
        program: The steps of the block, and the programs of the blocks inside it.
        functions: Functions from a 2×4 tensor to another one, selected by the steps.
    """

    def __init__(self, program: Program, functions: Sequence[Callable[[Tensor], Tensor]] = _FUNCTIONS) -> None:
        super().__init__()
        self.steps, inner = program
        self.functions = functions
        self.weight = nn.Parameter(torch.ones(4))
        self.parts = nn.ModuleList(Block(each, functions) for each in inner)

    def forward(self, x: Tensor, lent: Tensor | None = None) -> Tensor:
        values = [x if lent is None else x * lent]
        for kind, one, other in _unrolled(self.steps):
            left, right = values[-1 - one % len(values)], values[-1 - other % len(values)]
            if kind == "function":
                values.append(self.functions[other % len(self.functions)](left))
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
    """Return the steps, with the last few repeated at each ``again``."""
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


def _recorded(program: Program) -> Graph:
    net = Block(program)
    with GraphCapture(net, X) as recording:
        out = net(X)
        if out.requires_grad:
            out.sum().backward()
    return recording.graph()


programs: st.SearchStrategy[Program] = st.recursive(
    st.tuples(_STEPS, st.just(())),
    lambda inner: st.tuples(_STEPS, st.lists(inner, min_size=1, max_size=2).map(tuple)),
    max_leaves=4,
)
"""Programs of models with shared modules, residual connections, loops, and parameters lent to submodules."""

graphs: st.SearchStrategy[Graph] = programs.map(_recorded)
"""Graphs of such models, including views and detached tensors."""
