"""Base classes of gradient taps and hooks, with a limit on visited graph nodes, and a tap for parameter gradients."""

from __future__ import annotations

import inspect
import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.parameter import is_lazy
from typing_extensions import override

from lightning_recorder.errors import warn
from lightning_recorder.internals.autograd import (
    current_node,
    graph_task,
    hooks_of_leaf,
    in_backward,
    sequence_number,
    sequence_number_of,
)
from lightning_recorder.internals.module_tree import hookable
from lightning_recorder.module_names import own_parameters
from lightning_recorder.taps.base import Receiver, Site, Tap, TapHook

__all__ = ["GRAPH_NODE_LIMIT", "GradientHook", "GradientTap", "ParameterGradientTap", "Total"]

# torch frees nodes that Python has visited recursively. With 45,000 such nodes in a row, as from an unrolled loop,
# the stack overflows and the process ends (torch 2.13, 8 MiB of stack; ``tensor.grad_fn`` alone is enough).
_MOST_NODES = 20_000

# Counting the live nodes takes time, so after a refusal the next count waits for this many requests.
_REFUSALS = 1000

# The code that runs an autograd node written in Python, such as the node of a reentrant checkpoint.
_NODE = BackwardCFunction.apply.__code__

Hook = TypeVar("Hook", bound="GradientHook")


_LEAST_REFERENCES = 64  # number of references from which dead references are dropped


class _GraphNodeLimit:
    """A counter of visited nodes of live graphs. Nodes of freed graphs no longer count.

    All taps share one counter, because they visit the same graph.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._visited: list[tuple[Callable[[], object], int]] = []
        self._count = 0
        self._most = _LEAST_REFERENCES
        self._refusals = 0

    def has_room(self, nodes: int) -> bool:
        """Return True if ``nodes`` additional nodes may be visited."""
        if self._count + nodes <= _MOST_NODES:  # the common case; reading a number needs no lock
            return True
        with self._lock:
            if self._count + nodes <= _MOST_NODES:
                return True
            if self._refusals:
                self._refusals -= 1
                return False
            self._forget()
            if self._count + nodes <= _MOST_NODES:
                return True
            self._refusals = _REFUSALS
            return False

    def add(self, reference: Callable[[], object], nodes: int) -> None:
        """Count visited nodes that live as long as the target of the weak reference."""
        with self._lock:
            self._visited.append((reference, nodes))
            self._count += nodes
            if len(self._visited) >= self._most:  # dead references must not accumulate over several fits
                self._forget()

    def _forget(self) -> None:
        """Drop the nodes of freed graphs."""
        self._visited = [each for each in self._visited if each[0]() is not None]
        self._count = sum(number for _, number in self._visited)
        self._most = max(_LEAST_REFERENCES, 2 * len(self._visited))

    def expect_less(self) -> None:
        """Recount at the next request that exceeds the limit. Called after a backward pass, when graphs are freed."""
        self._refusals = 0


GRAPH_NODE_LIMIT = _GraphNodeLimit()


class GradientTap(Tap):
    """A tap that records tensors in the backward pass; arguments as for :class:`~lightning_recorder.taps.Tap`."""

    _during_backward: ClassVar[bool] = True  # a reentrant checkpoint builds the graph inside the backward pass

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        receive: Receiver,
        *,
        condition: Callable[[], object] | None = None,
        strict: bool = False,
    ) -> None:
        super().__init__(modules, receive, condition=condition, strict=strict)
        self.without_gradient: set[str] = set()
        """The names of modules with a call in which no output tensor (for input gradients: no input tensor) required a
        gradient. A user of the tap may clear this set."""
        self.changed_in_place: set[str] = set()
        """The names of modules that returned a view whose gradient is unknown because the view was changed in place. A
        user of the tap may clear this set."""
        self._warned = False
        self._numbers: dict[str, _CallNumbers] = {}

    @override
    def restart_calls(self) -> None:
        super().restart_calls()
        self._numbers.clear()

    @override
    def _count_call(self, name: str) -> None:
        self._calls[name] = self._numbers.setdefault(name, _CallNumbers()).count()

    def _may_visit(self, nodes: int) -> bool:
        """Return True if ``nodes`` additional nodes of the autograd graph may be visited. Otherwise, warn once."""
        if GRAPH_NODE_LIMIT.has_room(nodes):
            return True
        if not self._warned:
            self._warned = True
            warn(
                f"{type(self).__name__} follows {_MOST_NODES:,} operations of the living graphs, and "
                "records no gradients beyond them, because torch cannot free longer graphs. Record fewer modules."
            )
        return False

    def _register_on_tensor(self, tensor: Tensor, hook: Hook) -> Hook:
        """Register a hook on a tensor. A leaf outlives the step, so an equal hook on a leaf is reused.

        Returns:
            The registered hook.
        """
        is_leaf = tensor.is_leaf
        if is_leaf:
            for there in hooks_of_leaf(tensor):
                if isinstance(there, type(hook)) and there.place == hook.place:
                    return there
        handle = tensor.register_hook(hook)
        self._keep(handle)
        if not is_leaf:
            GRAPH_NODE_LIMIT.add(handle.hooks_dict_ref, 1)
        return hook


class _CallNumbers:
    """The numbers of the calls of one module, including calls that a checkpoint repeats inside the backward pass.

    A reentrant checkpoint creates its node before its calls, and repeats the calls in order while that node runs. So
    the first repeated call is the first call after the node was created. Nodes are compared by their sequence numbers,
    which are counted per thread. The node of a nested checkpoint is created while the outer checkpoint is repeated, on
    a GPU in the thread of the backward pass. So such a node is compared with repeated calls only.
    """

    def __init__(self) -> None:
        self._begun: list[int] = []  # the sequence number at each call of the forward pass
        self._begun_again: list[tuple[int, int]] = []  # of each repeated call: the sequence number and the call number
        self._last: dict[tuple[int, int], int] = {}  # the number of the last repeated call, by backward pass and node

    def count(self) -> int:
        """Count a call and return its number."""
        if in_backward():
            return self._repeat()
        self._begun.append(sequence_number())
        return len(self._begun)

    def _repeat(self) -> int:
        node = current_node()
        running = graph_task(), 0 if node is None else sequence_number_of(node)
        last = self._last.get(running)
        self._last[running] = number = self._first_after(running[1]) if last is None else last + 1
        if not torch.is_grad_enabled():  # perhaps the first pass of a checkpoint nested in the repeated checkpoint
            self._begun_again.append((sequence_number(), number))
        return number

    def _first_after(self, node: int) -> int:
        again = next((number for begun, number in self._begun_again if begun > node), None)
        if again is not None and _is_nested():
            return again
        earlier = bisect_right(self._begun, node)
        if earlier < len(self._begun):
            return earlier + 1
        return max(1, earlier) if again is None else again


def _is_nested() -> bool:
    """Return True in a backward pass that runs inside another backward pass of this thread, as in a checkpoint."""
    frame, nodes = inspect.currentframe(), 0
    while frame is not None and nodes < 2:
        nodes += frame.f_code is _NODE
        frame = frame.f_back
    return nodes == 2


class GradientHook:
    """A tensor hook that passes the gradient of one site to its tap."""

    # torch reads this attribute when it pickles the tensor. It marks the hook as omitted on purpose, so that torch does
    # not warn.
    __torch_unserializable__ = True

    def __init__(self, tap: GradientTap, name: str, path: str) -> None:
        self.tap = tap
        self.site = Site(name, path)

    @property
    def place(self) -> tuple[Tap, Site]:
        """The tap and the site, which identify the hook."""
        return self.tap, self.site

    def __call__(self, grad: Tensor | None) -> None:
        """Pass the gradient to the tap."""
        # torch passes None to the hook of an output that does not contribute to the loss.
        if grad is not None:
            GRAPH_NODE_LIMIT.expect_less()
            self.tap._guarded(self.site.name, self.site, self._record, grad)

    def _record(self, name: str, grad: Tensor) -> None:
        self.tap._pass_on(name, [(self.site.path, grad)])


class Total:
    """A gradient that is accumulated from its parts during one backward pass."""

    def __init__(self) -> None:
        self._task = -1
        self._sum: Tensor | None = None

    def add(self, part: Tensor) -> None:
        """Add a part of the gradient."""
        # Discard parts that remain from a backward pass that raised.
        if self._task != graph_task():
            self._task, self._sum = graph_task(), None
        # Adding a dense tensor to a sparse one is not supported, only the reverse.
        if self._sum is not None and self._sum.is_sparse:
            part, self._sum = self._sum, part
        self._sum = part if self._sum is None else self._sum + part

    def take(self) -> Tensor | None:
        """Return the sum of this backward pass, or ``None`` if there is none, and clear it."""
        total, self._sum = self._sum, None
        return total if self._task == graph_task() else None


class ParameterGradientTap(GradientTap):
    """Records the gradient that each backward pass adds to the parameters of the modules.

    The recorded gradient is computed by this backward pass alone, on this rank, with the scale of the differentiated
    loss. In contrast, ``.grad`` is the sum of these gradients since it was last zeroed, and with DDP the mean over the
    ranks.
    :class:`ParameterTap` defines the parameters that belong to a module. A frozen parameter has no gradient. A
    parameter that is unfrozen while the tap is attached is recorded from the next time the tap is attached.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(2, 1)
        >>> with ParameterGradientTap({"head": net}, lambda site, grad: print(*site, grad.tolist())):
        ...     net(torch.tensor([[2.0, 3.0]])).sum().backward()
        head bias [1.0]
        head weight [[2.0, 3.0]]
    """

    @override
    def _register(self, name: str, module: nn.Module) -> None:
        if any(is_lazy(parameter) for _, parameter in own_parameters(module)):
            # Lazy parameters do not support hooks before the first call of the module.
            self._keep(hookable(module).register_forward_hook(TapHook(self, name, self._record)))
        else:
            self._record(name, module)

    def _record(self, name: str, module: nn.Module, *passed: Any) -> None:
        for path, parameter in own_parameters(module):
            if parameter.requires_grad:
                self._register_on_tensor(parameter, GradientHook(self, name, path))
