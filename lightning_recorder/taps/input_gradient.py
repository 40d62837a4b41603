"""The gradients of the tensors that modules take, through these modules."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from typing_extensions import override

from lightning_recorder.autograd import (
    graph_task,
    is_transformed,
    running_calls,
    sequence_number,
    sequence_number_of,
)
from lightning_recorder.taps.base import TapHook
from lightning_recorder.taps.gradient import GradientHook, GradientTap
from lightning_recorder.taps.living import LIVING_NODES

__all__ = ["InputGradientTap"]

_Edge = tuple[Node, int]
"""A node of the autograd graph and which of its outputs."""


class InputGradientTap(GradientTap):
    """Hands over the gradient of the loss with respect to each tensor that the modules take, through the module.

    What other users of the tensor add to its gradient is left out: in ``x + branch(x)`` the input of ``branch`` has the
    gradient that comes back out of ``branch`` alone. Nothing is put into the autograd graph for this. When the module
    is called, the nodes are noted that gave its inputs; when it returns, the graph is searched from its outputs for the
    nodes that take them, and these get a hook. Where several take one input the parts of its gradient are summed as
    the backward pass brings them, and the sum is handed over when the whole gradient of the tensor is complete.

    Note:
        A module that returns its input has the gradient of the whole tensor, with all its uses, since nothing tells
        them apart. One tensor that is given as two arguments has one gradient, under the first of their paths. The
        gradient of an input is not found if it is a view which the module changes in place, if what comes of it leaves
        the module otherwise than by its output, or if another thread computes it. Checkpoints, repeated backward passes
        and the end of the tap are as for :class:`~lightning_recorder.OutputGradientTap`.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(2, 1, bias=False)
        >>> _ = net.weight.data.copy_(torch.tensor([[2.0, 3.0]]))
        >>> x = torch.ones(1, 2, requires_grad=True)
        >>> with InputGradientTap({"head": net}, lambda site, grad: print(*site, grad.tolist())):
        ...     (net(x).sum() + 10 * x.sum()).backward()
        head in[0] [[2.0, 3.0]]
    """

    @override
    def _put_on(self, name: str, module: nn.Module) -> None:
        self._keep(module.register_forward_pre_hook(TapHook(self, name, self._see_inputs), with_kwargs=True))
        # Called also if the module raises, as it does where a recomputation ends early: what was opened is closed.
        self._keep(module.register_forward_hook(TapHook(self, name, self._see_output), always_call=True))

    @override
    def remove(self) -> None:
        super().remove()
        _OPEN_CALLS.drop_detached()

    def _see_inputs(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entering: dict[_Edge, _Input] = {}
        if self._may_look_at(1):
            for path, tensor in self._inputs(name, args, kwargs):
                edge = _edge(tensor)
                if edge is not None:
                    entering.setdefault(edge, _Input(path, tensor))
        _OPEN_CALLS.open(_Call(self, name, module, sequence_number(), entering))

    def _see_output(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        call = _OPEN_CALLS.close(self, name, module)
        if call is None:
            return
        made = sequence_number() - call.first
        new = made - call.looked_at
        if call.entering and self._may_look_at(new):
            call.looked_at = made
            alive = self._search(call, output)
            if alive is not None:
                LIVING_NODES.add(alive, new)
        _OPEN_CALLS.look_at(call.looked_at)

    def _search(self, call: _Call, output: Any) -> Callable[[], object] | None:
        """Put hooks on what takes the inputs of a call that has ended.

        Returns:
            A weak reference to something that lives as long as the graph of the call, if it has one.
        """
        leaving: dict[_Edge, Tensor] = {}
        for _, tensor in self._tensors(call.name, output, "out"):
            edge = _edge(tensor)
            if edge is not None:
                leaving.setdefault(edge, tensor)
        through = call.entering.keys() & leaving.keys()
        for edge in through:
            self._put_on_tensor(leaving[edge], GradientHook(self, call.name, call.entering[edge].path))
        roots = [node for node, number in leaving if (node, number) not in through]
        alive: list[Callable[[], object]] = [weakref.ref(tensor) for tensor in leaving.values()]
        for edge, takers in _takers(roots, call).items():
            if edge not in through:
                alive = [self._put_on_takers(call.name, edge, call.entering[edge], takers)]
        return alive[0] if alive else None

    def _put_on_takers(
        self, name: str, edge: _Edge, taken: _Input, takers: dict[Node, list[int]]
    ) -> Callable[[], object]:
        total = _Total()
        alone = sum(map(len, takers.values())) == 1
        complete = _CompleteHook(self, name, taken.path)
        if not alone:
            # All that take a tensor have run when its own gradient is complete. After an in-place operation the tensor
            # is another one to autograd, and the node that gave it has to do.
            if _edge(taken.tensor) == edge:
                complete = self._put_on_tensor(taken.tensor, complete)
            else:
                self._keep(edge[0].register_prehook(complete))
            complete.expect(total)
        for node, places in takers.items():
            handle = node.register_hook(_TakerHook(complete, total, places, alone))
            self._keep(handle)
        return handle.hooks_dict_ref


class _Input(NamedTuple):
    """A tensor that a module was given."""

    path: str
    tensor: Tensor


@dataclass
class _Call:
    """A module call that has begun; what is in it is gone when it ends."""

    tap: InputGradientTap
    name: str
    module: nn.Module
    first: int
    """The number of the first node that it can make."""
    entering: dict[_Edge, _Input]
    """Each input by the edge of the autograd graph that it stands for."""
    looked_at: int = 0
    """How many of its nodes were looked at already, by calls inside it."""


class _OpenCalls(threading.local):
    """The calls of this thread that have begun and not yet returned, the innermost last, those of all taps together."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []

    def open(self, call: _Call) -> None:
        """Begin a call."""
        # What a KeyboardInterrupt has ended was not closed, as torch then calls no hooks.
        older = [each for each in self.calls if each.tap is call.tap and each.name == call.name]
        if older:
            gone = older[: max(0, len(older) + 1 - running_calls(call.module))]
            self.calls = [each for each in self.calls if not any(each is one for one in gone)]
        self.drop_detached()
        self.calls.append(call)

    def drop_detached(self) -> None:
        """Forget the calls of taps that were taken off, as a KeyboardInterrupt leaves them."""
        self.calls = [each for each in self.calls if each.tap.attached]

    def close(self, tap: InputGradientTap, name: str, module: nn.Module) -> _Call | None:
        """The innermost call of a module, which ends it and what is still open inside it."""
        for place in reversed(range(len(self.calls))):
            call = self.calls[place]
            if call.tap is tap and call.name == name:
                # A module with two names or taps has two calls open at once, which end in the order they began in.
                self.calls[place:] = [inner for inner in self.calls[place + 1 :] if inner.module is module]
                return call
        return None

    def look_at(self, nodes: int) -> None:
        """Note that so many nodes of the innermost call were looked at."""
        if self.calls:
            self.calls[-1].looked_at += nodes


_OPEN_CALLS = _OpenCalls()


class _Total:
    """The gradient of one input, as far as the nodes that take it have brought it in one backward pass."""

    def __init__(self) -> None:
        self._task = -1
        self._sum: Tensor | None = None

    def add(self, part: Tensor) -> None:
        """Add a part."""
        # What a backward pass that raised has left behind is no part of the next one.
        if self._task != graph_task():
            self._task, self._sum = graph_task(), None
        # A sparse tensor can be added to a dense one, and not the other way round.
        if self._sum is not None and self._sum.is_sparse:
            part, self._sum = self._sum, part
        self._sum = part if self._sum is None else self._sum + part

    def take(self) -> Tensor | None:
        """The sum of this backward pass, which is then gone."""
        total, self._sum = self._sum, None
        return total if self._task == graph_task() else None


class _CompleteHook(GradientHook):
    """The hook of a tensor, or of the node that gave it, which is called when its whole gradient is complete."""

    tap: InputGradientTap

    def __init__(self, tap: InputGradientTap, name: str, path: str) -> None:
        super().__init__(tap, name, path)
        # Held by the nodes that bring them: a leaf, which keeps this hook, does not keep what belongs to a step.
        self._totals: weakref.WeakValueDictionary[int, _Total] = weakref.WeakValueDictionary()

    def expect(self, total: _Total) -> None:
        """Hand this one over, too."""
        self._totals[next(_COUNTER)] = total

    @override
    def __call__(self, grad: object) -> None:
        self.tap._bring(self.site.name, self._complete)

    def _complete(self, name: str) -> None:
        for total in list(self._totals.values()):
            self.hand_over(total)

    def hand_over(self, total: _Total) -> None:
        """Hand a sum over, if this backward pass has brought anything."""
        grad = total.take()
        if grad is not None:
            self.tap._hand_over(self.site.name, [(self.site.path, grad)])


_COUNTER = itertools.count()


class _TakerHook:
    """The hook of a node that takes an input of a module."""

    def __init__(self, complete: _CompleteHook, total: _Total, places: list[int], alone: bool) -> None:
        self._complete = complete
        self._total = total
        self._places = places
        self._alone = alone

    def __call__(self, grad_inputs: tuple[Tensor | None, ...], grad_outputs: tuple[Tensor | None, ...]) -> None:
        self._complete.tap._bring(self._complete.site.name, self._add, grad_inputs)

    def _add(self, name: str, grad_inputs: tuple[Tensor | None, ...]) -> None:
        for place in self._places:
            part = grad_inputs[place]
            if part is not None and not is_transformed(part):
                self._total.add(part.detach())
        if self._alone:
            self._complete.hand_over(self._total)


def _edge(tensor: Tensor) -> _Edge | None:
    """The edge of the autograd graph that a tensor stands for, if it stands for one."""
    if not tensor.requires_grad:
        return None
    try:
        edge = get_gradient_edge(tensor)
    except (RuntimeError, AssertionError):
        # Of a view whose base was changed in place in a way that forbids it a gradient, or of one of several that were
        # made without autograd.
        return None
    return edge.node, edge.output_nr


def _takers(roots: Iterable[Node], call: _Call) -> dict[_Edge, dict[Node, list[int]]]:
    """The nodes of a call that take its inputs, each with the places of its own inputs at which it does, by edge."""
    found: dict[_Edge, dict[Node, list[int]]] = {}
    todo = list(roots)
    seen: set[Node] = set()
    while todo:
        node = todo.pop()
        # What was there before the call, and the nodes of leaves, have no part in it.
        if node in seen or not call.first <= sequence_number_of(node):
            continue
        seen.add(node)
        for place, edge in enumerate(node.next_functions):
            if edge in call.entering:
                found.setdefault(edge, {}).setdefault(node, []).append(place)
            elif edge[0] is not None:
                todo.append(edge[0])
    return found
