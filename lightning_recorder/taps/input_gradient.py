"""A tap for the gradients of module inputs that flow back through the module."""

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

from lightning_recorder.internals.autograd import (
    base_of,
    is_transformed,
    running_calls,
    sequence_number,
    sequence_number_of,
)
from lightning_recorder.internals.module_tree import hookable
from lightning_recorder.taps.base import TapHook
from lightning_recorder.taps.gradient import GRAPH_NODE_LIMIT, GradientHook, GradientTap, Total
from lightning_recorder.taps.view import Region, View

__all__ = ["InputGradientTap"]

_Edge = tuple[Node, int]
"""A node of the autograd graph and the index of one of its outputs."""


class InputGradientTap(GradientTap):
    """Records the gradient of the loss with respect to each input tensor of the modules, through the module.

    Contributions from other uses of the tensor are excluded: in ``x + branch(x)``, the recorded gradient of the input
    of ``branch`` is only the gradient that flows back through ``branch``. Nothing is added to the autograd graph. When
    the module is called, the tap notes the nodes that produced its inputs. When the module returns, the tap searches
    the graph from the outputs for the nodes that consume these inputs, and registers hooks on them. If several nodes
    consume one input, the parts of its gradient are summed while the backward pass computes them. The sum is recorded
    when the whole gradient of the tensor is complete.

    Note:
        For a module that returns its input, the recorded gradient is the gradient of the tensor over all its uses,
        because the uses cannot be separated. A tensor that is passed as two arguments has one gradient, recorded at the
        path of the first argument. The gradient of an input is not found if its results leave the module other than
        through the output, or if another thread computes them. It is also not found for a view that the module changes
        in place, if the module also receives the base or another view of the base. Checkpointing, repeated backward
        passes and the removal of the tap are handled as in :class:`~lightning_recorder.taps.OutputGradientTap`.

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
    def _register(self, name: str, module: nn.Module) -> None:
        self._keep(hookable(module).register_forward_pre_hook(TapHook(self, name, self._enter_call), with_kwargs=True))
        # Also called if the module raises, as a recomputation that stops early does, so that every call is closed.
        leave = TapHook(self, name, self._leave_call)
        self._keep(hookable(module).register_forward_hook(leave, always_call=True))

    @override
    def remove(self) -> None:
        super().remove()
        _OPEN_CALLS.drop_detached()

    def _enter_call(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entering: dict[_Edge, _Input] = {}
        found = tuple(self._inputs(name, args, kwargs))
        if found and not any(tensor.requires_grad for _, tensor in found):
            self.without_gradient.add(name)
        elif self._may_visit(1):
            for path, tensor in found:
                edge = _edge(tensor)
                if edge is not None:
                    entering.setdefault(edge, _Input(path, tensor))
        views = _views_in(entering)
        _OPEN_CALLS.open(_Call(self, name, module, sequence_number(), entering, views))

    def _leave_call(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        call = _OPEN_CALLS.close(self, name, module)
        if call is None:
            return
        made = sequence_number() - call.first
        new = made - call.visited
        if call.entering and self._may_visit(new):
            call.visited = made
            alive = self._search(call, output)
            if alive is not None:
                GRAPH_NODE_LIMIT.add(alive, new)
        _OPEN_CALLS.add_visited(call.visited)

    def _search(self, call: _Call, output: Any) -> Callable[[], object] | None:
        """Register hooks on the consumers of the inputs of a call that has ended.

        Returns:
            A weak reference to an object that lives as long as the graph of the call, or ``None`` without a graph.
        """
        leaving: dict[_Edge, Tensor] = {}
        for _, tensor in self._tensors(call.name, output, "out"):
            edge = _edge(tensor)
            if edge is not None:
                leaving.setdefault(edge, tensor)
        through = call.entering.keys() & leaving.keys()
        for edge in through:
            self._register_on_tensor(leaving[edge], GradientHook(self, call.name, call.entering[edge].path))
        roots = [node for node, number in leaving if (node, number) not in through]
        alive: list[Callable[[], object]] = [weakref.ref(tensor) for tensor in leaving.values()]
        found = _consumers(roots, call)
        for edge, taken in call.entering.items():
            consumers = [_Consumer(node, places, None) for node, places in found.get(edge, {}).items()]
            base = call.views.get(edge)
            if base is not None and base.view.is_changed:
                # The modified tensor is the first input of an in-place operation.
                writers = [node for node, places in found.get(base.edge, {}).items() if 0 in places]
                consumers += [_Consumer(node, [0], base.view.region) for node in writers]
            if consumers and edge not in through:
                alive = [self._register_on_consumers(call, edge, taken, consumers)]
        return alive[0] if alive else None

    def _register_on_consumers(
        self, call: _Call, edge: _Edge, taken: _Input, consumers: list[_Consumer]
    ) -> Callable[[], object]:
        total = Total()
        alone = sum(len(each.places) for each in consumers) == 1
        complete = _CompleteHook(self, call.name, taken.path)
        if not alone:
            # When the gradient of a tensor is complete, all its consumers have run. After an in-place operation, the
            # tensor has another node, so register the hook on the node that produced it, or on the base of a view.
            if _edge(taken.tensor) == edge:
                complete = self._register_on_tensor(taken.tensor, complete)
            elif any(each.region for each in consumers):
                self._keep(call.views[edge].edge[0].register_prehook(complete))
            else:
                self._keep(edge[0].register_prehook(complete))
            complete.expect(total)
        for consumer in consumers:
            handle = consumer.node.register_hook(_ConsumerHook(complete, total, consumer, alone))
            self._keep(handle)
        return handle.hooks_dict_ref


class _Input(NamedTuple):
    """An input tensor of a module."""

    path: str
    tensor: Tensor


class _Base(NamedTuple):
    """The base of an input that is a view."""

    edge: _Edge
    view: View


class _Consumer(NamedTuple):
    """A node that consumes an input of a module, or the base of an input."""

    node: Node
    places: list[int]
    """The indices among the inputs of the node."""
    region: Region | None
    """The region of the base that the input covers, or ``None`` for an input that is consumed directly."""


@dataclass
class _Call:
    """A module call that is in progress. It is discarded when the call ends."""

    tap: InputGradientTap
    name: str
    module: nn.Module
    first: int
    """The sequence number of the first node that the call can create."""
    entering: dict[_Edge, _Input]
    """Each input by its edge of the autograd graph."""
    views: dict[_Edge, _Base]
    """The base of each input that is a view, by the edge of the input."""
    visited: int = 0
    """Number of nodes of this call that were already visited for nested calls."""


class _OpenCalls(threading.local):
    """The module calls in progress in this thread for all taps, innermost last."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []

    def open(self, call: _Call) -> None:
        """Start a call."""
        # A KeyboardInterrupt leaves calls open, because torch then does not call the hooks.
        older = [each for each in self.calls if each.tap is call.tap and each.name == call.name]
        if older:
            gone = older[: max(0, len(older) + 1 - running_calls(call.module))]
            self.calls = [each for each in self.calls if not any(each is one for one in gone)]
        self.drop_detached()
        self.calls.append(call)

    def drop_detached(self) -> None:
        """Drop the calls of removed taps, which a KeyboardInterrupt can leave open."""
        self.calls = [each for each in self.calls if each.tap.attached]

    def close(self, tap: InputGradientTap, name: str, module: nn.Module) -> _Call | None:
        """Remove and return the innermost call of a module. Calls that are still open inside it are removed, too."""
        for place in reversed(range(len(self.calls))):
            call = self.calls[place]
            if call.tap is tap and call.name == name:
                # A module with two names or taps has two open calls, which end in the order in which they started.
                self.calls[place:] = [inner for inner in self.calls[place + 1 :] if inner.module is module]
                return call
        return None

    def add_visited(self, nodes: int) -> None:
        """Count nodes of the innermost call as visited."""
        if self.calls:
            self.calls[-1].visited += nodes


_OPEN_CALLS = _OpenCalls()


class _CompleteHook(GradientHook):
    """A hook on a tensor, or on the node that produced it, that runs when the whole gradient is complete."""

    tap: InputGradientTap

    def __init__(self, tap: InputGradientTap, name: str, path: str) -> None:
        super().__init__(tap, name, path)
        # The consumer nodes hold the totals. A leaf keeps this hook, which must not keep tensors of a step alive.
        self._totals: weakref.WeakValueDictionary[int, Total] = weakref.WeakValueDictionary()

    def expect(self, total: Total) -> None:
        """Register a sum to record when the gradient is complete."""
        self._totals[next(_COUNTER)] = total

    @override
    def __call__(self, grad: object) -> None:
        GRAPH_NODE_LIMIT.expect_less()
        self.tap._guarded(self.site.name, None, self._complete)

    def _complete(self, name: str) -> None:
        for total in list(self._totals.values()):
            self.pass_on(total)

    def pass_on(self, total: Total) -> None:
        """Record a sum if this backward pass has contributed to it."""
        grad = total.take()
        if grad is not None:
            self.tap._pass_on(self.site.name, [(self.site.path, grad)])


_COUNTER = itertools.count()


class _ConsumerHook:
    """A hook on a node that consumes an input of a module."""

    def __init__(self, complete: _CompleteHook, total: Total, consumer: _Consumer, alone: bool) -> None:
        self._complete = complete
        self._total = total
        self._places = consumer.places  # a reference to the consumer would keep its node, which refers to this hook
        self._region = consumer.region
        self._alone = alone

    def __call__(self, grad_inputs: tuple[Tensor | None, ...], grad_outputs: tuple[Tensor | None, ...]) -> None:
        GRAPH_NODE_LIMIT.expect_less()
        self._complete.tap._guarded(self._complete.site.name, None, self._add, grad_inputs)

    def _add(self, name: str, grad_inputs: tuple[Tensor | None, ...]) -> None:
        for place in self._places:
            part = grad_inputs[place]
            if part is not None and not is_transformed(part):
                part = part.detach()
                self._total.add(part if self._region is None else self._region.part_of(part))
        if self._alone:
            self._complete.pass_on(self._total)


def _edge(tensor: Tensor) -> _Edge | None:
    """Return the edge of the autograd graph for a tensor, or ``None`` if the tensor has no edge."""
    if not tensor.requires_grad:
        return None
    try:
        edge = get_gradient_edge(tensor)
    except (RuntimeError, AssertionError):
        # A view has no edge if its base was changed in place in a way that forbids its gradient, or if it is one of
        # several views that were created without autograd.
        return None
    return edge.node, edge.output_nr


def _views_in(entering: dict[_Edge, _Input]) -> dict[_Edge, _Base]:
    """Return the bases of the inputs that are views.

    Bases that are inputs themselves, and bases with several views among the inputs, are left out.
    """
    found: dict[_Edge, _Base] = {}
    for edge, (_, tensor) in entering.items():
        base = base_of(tensor)
        # A leaf can have views, too, but it cannot be changed in place.
        base_edge = None if base is None or base.is_leaf else _edge(base)
        view = None if base is None or base_edge is None else View.of(tensor, base)
        if base_edge is not None and view is not None:
            found[edge] = _Base(base_edge, view)
    edges = [base.edge for base in found.values()]
    return {edge: each for edge, each in found.items() if each.edge not in entering and edges.count(each.edge) == 1}


def _consumers(roots: Iterable[Node], call: _Call) -> dict[_Edge, dict[Node, list[int]]]:
    """Find the nodes of a call that consume the inputs of the call or the bases of these inputs.

    Returns:
        By the edge of the input or base: the consuming nodes, each with the indices of that edge among its own inputs.
    """
    wanted = call.entering.keys() | {base.edge for base in call.views.values()}
    found: dict[_Edge, dict[Node, list[int]]] = {}
    todo = list(roots)
    seen: set[Node] = set()
    while todo:
        node = todo.pop()
        # Nodes from before the call and nodes of leaves are not part of the call.
        if node in seen or not call.first <= sequence_number_of(node):
            continue
        seen.add(node)
        for place, edge in enumerate(node.next_functions):
            if edge in wanted:
                found.setdefault(edge, {}).setdefault(node, []).append(place)
            elif edge[0] is not None:
                todo.append(edge[0])
    return found
