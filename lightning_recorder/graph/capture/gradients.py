"""The parameters that got gradients, and the backward passes whose gradients each optimizer step uses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from lightning_recorder.graph.capture.builder import GraphBuilder
from lightning_recorder.graph.capture.origins import TensorOrigins
from lightning_recorder.graph.model import OTHER_PARAMETERS
from lightning_recorder.internals.autograd import versions_of
from lightning_recorder.internals.module_tree import parameters_of

__all__ = ["Gradients"]

_MOST_PARTS = 3  # maximum number of module names in the name of an optimizer node


class Gradients:
    """Tracks which backward passes gave each parameter its gradient, and adds the nodes of optimizer steps.

    Args:
        builder: The graph under construction.
        origins: Knows the names of the model's parameters.
        root: The model.
    """

    def __init__(self, builder: GraphBuilder, origins: TensorOrigins, root: nn.Module) -> None:
        self._builder = builder
        self._origins = origins
        self._root = root
        self._begun: dict[int, int] = {}
        """By id of the optimizer: the number of nodes when its step in progress began."""
        self._stepped: dict[int, int] = {}
        """By id of the optimizer: the number of nodes at its last step."""
        self._reset: dict[str, int] = {}
        """By parameter name: the number of nodes when the parameter last had no gradient."""
        self._before: dict[str, tuple[int, int | None]] = {}
        """By parameter name: the id and the version of the gradient before the backward pass in progress."""
        self.given: set[str] = set()
        """The names of the parameters that got a gradient in a backward pass."""
        self.updated: set[str] = set()
        """The names of the parameters of the optimizers that made a step."""

    def note_backward(self, node: int) -> None:
        """Remember the gradients at the beginning of a backward pass, and the parameters without a gradient."""
        self._before = dict(self._present())
        for each in parameters_of(self._root):
            if each.grad is None and (name := self._name(each)) is not None:
                self._reset[name] = node

    def end_backward(self) -> None:
        """Remember the parameters whose gradients are new or changed when a backward pass ends."""
        self.given.update(name for name, gradient in self._present() if self._before.get(name) != gradient)

    def _present(self) -> Iterator[tuple[str, tuple[int, int | None]]]:
        """Yield the name of each parameter that has a gradient, with the id and the version of the gradient."""
        for each in parameters_of(self._root):
            if each.grad is not None and (name := self._name(each)) is not None:
                yield name, (id(each.grad), versions_of([each.grad])[0])

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember where an optimizer step begins. The step may run a closure several times."""
        self._begun[id(optimizer)] = len(self._builder.nodes)

    def note_zeroed(self, tensors: Iterable[Tensor]) -> None:
        """Remember the parameters whose gradients are among these zeroed tensors."""
        zeroed = set(map(id, tensors))
        for each in parameters_of(self._root):
            if id(each.grad) in zeroed and (name := self._name(each)) is not None:
                self._reset[name] = len(self._builder.nodes)

    def _name(self, tensor: Tensor) -> str | None:
        known = self._origins.model_tensor(tensor)
        return None if known is None else known[1]

    def note_step(self, optimizer: torch.optim.Optimizer, source: str) -> None:
        """Add the node of an optimizer step, with edges from the backward passes whose gradients the step uses."""
        nodes = self._builder.nodes
        start = self._stepped.get(id(optimizer), 0)
        self._stepped[id(optimizer)] = len(nodes)
        passes = [number for number in range(start, len(nodes)) if nodes[number].kind == "backward"]
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        named = {name: each for each in parameters if (name := self._name(each)) is not None}
        self.updated.update(named)
        updated = {name for name, each in named.items() if each.grad is not None}
        # A step uses the gradients of every evaluation of its closure, although the closure resets them. The step uses
        # results of ``torch.autograd.grad`` only if they are assigned to ``grad``.
        begun = self._begun.pop(id(optimizer), len(nodes))
        inside = {number for number in passes if number >= begun and nodes[number].name != "grad"}
        used = [number for number in passes if self._gave(number, updated, number in inside)]
        node = self._builder.add("optimizer", self._title(type(optimizer).__name__, list(named)), 0, source=source)
        if not named:
            nodes[node].note = OTHER_PARAMETERS
        # If a wrapper has joined all parameters into one, their names are unknown: use the last backward pass.
        for number in used if named else passes[-1:]:
            self._builder.connect(number, node, None)

    def _gave(self, number: int, updated: set[str], inside: bool) -> bool:
        """Return True if an optimizer step used a gradient of a backward pass.

        ``updated`` are the parameters with a gradient. ``inside`` is True if the pass ran in the closure of the step.
        """
        nodes = self._builder.nodes
        return any(
            nodes[each].kind == "parameter"
            and nodes[each].name in updated
            and (inside or self._reset.get(nodes[each].name, 0) <= number)
            for each in self._builder.reached_by_gradient([number])
        )

    def _title(self, optimizer: str, names: list[str]) -> str:
        """Return the class name of an optimizer, with the modules that it updates unless it updates all of them."""
        others = [name for each in parameters_of(self._root) if (name := self._name(each)) not in names]
        if not names or not others:
            return optimizer
        parts = _common(names)
        more = f", … {len(parts) - _MOST_PARTS} more" if len(parts) > _MOST_PARTS else ""
        return f"{optimizer} · {', '.join(parts[:_MOST_PARTS])}{more}"


def _common(names: list[str]) -> list[str]:
    """Return the innermost module that contains all parameters, or their outermost modules if there is none."""
    split = [name.split(".")[:-1] or [name] for name in names]
    shared = 0
    while all(len(each) > shared and each[shared] == split[0][shared] for each in split):
        shared += 1
    if shared:
        return [".".join(split[0][:shared])]
    return list(dict.fromkeys(each[0] for each in split))
