"""Small models that are defined beside their expected graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_recorder.graph import Graph, GraphCapture, capture_graph, without

__all__ = ["Net", "X", "bare", "block", "linear", "record_step", "scaled", "stack"]

X = torch.linspace(-1.0, 1.0, 8).reshape(2, 4)
"""A batch of two rows."""


class Net(nn.Module):
    """A model whose forward pass is a function of the model and its inputs.

    Args:
        function: The forward pass.
        parts: Its submodules by name.
    """

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def linear(inputs: int = 4, outputs: int = 4) -> nn.Linear:
    """Return a linear layer that fits the batch."""
    return nn.Linear(inputs, outputs)


def block() -> nn.Module:
    """Return a residual block that is two levels deep."""
    inner = nn.Sequential(linear(), nn.ReLU())
    return Net(lambda net, x: x + net.inner(x), inner=inner)


def stack(number: int) -> nn.Module:
    """Return a chain of residual blocks."""
    return nn.Sequential(*(block() for _ in range(number)))


def bare(net: nn.Module, *inputs: Tensor) -> Graph:
    """Return a recording without the tensors of the model."""
    return without(capture_graph(net, *inputs), ("parameter", "buffer"))


def scaled(function: Callable[..., Any], **parts: nn.Module) -> Any:
    """Return a model with a parameter ``scale`` of value 1, so that its output has a gradient without a layer."""
    net: Any = Net(function, **parts)
    net.scale = nn.Parameter(torch.ones(()))
    return net


def record_step(net: nn.Module, step: Callable[[Any, Tensor], object]) -> Graph:
    """Return the graph of a training step that is a function of the net and its batch."""
    with GraphCapture(net, X, scope="training_step") as recording:
        step(net, X)
    return recording.graph()
