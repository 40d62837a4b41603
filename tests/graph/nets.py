"""Small models whose forward pass stands beside the graph that is expected of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["Net", "X", "linear"]

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
    """A layer that fits the batch."""
    return nn.Linear(inputs, outputs)
