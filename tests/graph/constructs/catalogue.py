"""The catalogue of constructs: small nets with their expected graphs."""

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
    """A net with its arguments and its expected graph.

    Args:
        net: The model.
        inputs: Its arguments.
        expected: The outline of its graph, indented as in the code.
        keywords: Its keyword arguments.
        around: The context in which it is called, such as ``torch.no_grad``.
        outputs: Show the output nodes in the outline.
        model_tensors: Show parameters and buffers in the outline.
        backward: Differentiate the sum of the outputs during the capture.
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
        """Return the graph of one call, with the tensors that the call returned."""
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
        """Return the output tensors of a call without a capture."""
        with self.around():
            return _tensors(self.run())


def _tensors(out: Any) -> list[Tensor]:
    return [tensor.detach().clone() for _, tensor in iter_tensors(out)]


CONSTRUCTS: dict[str, Callable[[], Construct]] = {}
"""The functions that create the constructs, by name."""


def construct(make: Callable[[], Construct]) -> Callable[[], Construct]:
    """Register a function that creates a construct."""
    CONSTRUCTS[make.__name__] = make
    return make


def fresh(make: Callable[[], Construct]) -> Construct:
    """Create a construct with the same parameters each time."""
    torch.manual_seed(0)
    return make()
