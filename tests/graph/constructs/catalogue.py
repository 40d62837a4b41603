"""What a construct is: a small net with the graph that is expected of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_recorder.graph import Graph, GraphCapture
from lightning_recorder.structure import iter_tensors

__all__ = ["CONSTRUCTS", "Construct", "construct", "fresh"]


@dataclass(frozen=True)
class Construct:
    """A net, what it is called with, and its graph.

    Args:
        net: The model.
        inputs: Its arguments.
        expected: The outline of its graph, indented as it stands in the code.
        keywords: Its keyword arguments.
        around: The context in which it is called, as ``torch.no_grad``.
        outputs: Whether the outline shows the output nodes.
        model_tensors: Whether the outline shows parameters and buffers.
        backward: Whether the sum of what comes out is differentiated during the capture.
    """

    net: nn.Module
    inputs: tuple[Any, ...]
    expected: str
    keywords: Mapping[str, Any] = field(default_factory=dict)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    outputs: bool = False
    model_tensors: bool = False
    backward: bool = False

    def record(self) -> tuple[Graph, list[Tensor]]:
        """The graph of one call, with the tensors that came out of it."""
        single = len(self.inputs) == 1 and not self.keywords
        inputs: Any = self.inputs[0] if single else {**dict(enumerate(self.inputs)), **self.keywords}
        with self.around(), GraphCapture(self.net, inputs) as recording:
            out = self.run()
            recording.add_outputs(out)
            if self.backward:
                out.sum().backward()
        return recording.graph(), _tensors(out)

    def run(self) -> Any:
        """Call the net as :meth:`record` does."""
        torch.manual_seed(1)
        return self.net(*self.inputs, **self.keywords)

    def values(self) -> list[Tensor]:
        """What comes out without a capture."""
        with self.around():
            return _tensors(self.run())


def _tensors(out: Any) -> list[Tensor]:
    return [tensor.detach().clone() for _, tensor in iter_tensors(out)]


CONSTRUCTS: dict[str, Callable[[], Construct]] = {}
"""Functions that make the constructs, by their names."""


def construct(make: Callable[[], Construct]) -> Callable[[], Construct]:
    """Put a function that makes a construct among the others."""
    CONSTRUCTS[make.__name__] = make
    return make


def fresh(make: Callable[[], Construct]) -> Construct:
    """The construct with the same parameters each time."""
    torch.manual_seed(0)
    return make()
