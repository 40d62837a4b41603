"""A tap for the time and the memory that the calls of modules take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from typing_extensions import override

from lightning_recorder.internals.autograd import saved_tensors, sequence_number, sequence_number_of
from lightning_recorder.internals.module_tree import buffers_of, hookable, parameters_of
from lightning_recorder.internals.stopwatch import Started, Stopwatch, elapsed_ms
from lightning_recorder.internals.storage import address_of, storage_of
from lightning_recorder.taps.base import Receiver, Site, TapHook
from lightning_recorder.taps.gradient import GRAPH_NODE_LIMIT, GradientTap, ParameterGradientTap
from lightning_recorder.taps.input_gradient import InputGradientTap
from lightning_recorder.taps.output_gradient import OutputGradientTap

__all__ = ["CostTap"]


class _OutputGradients(OutputGradientTap):
    """A tap of output gradients. :class:`CostTap` registers its hooks, and excludes the time that this takes."""

    @override
    def _register(self, name: str, module: nn.Module) -> None:
        pass


class _InputGradients(InputGradientTap):
    """A tap of input gradients, whose hooks are registered like those of :class:`_OutputGradients`."""

    @override
    def _register(self, name: str, module: nn.Module) -> None:
        pass


@dataclass
class _Forward:
    """A call that is in progress."""

    name: str
    first: int
    """The sequence number of the first node that the call can create."""
    began: Started
    hooks_ms: float = 0.0
    """The time in the hooks of nested calls, which is subtracted from the time of this call."""
    saved: int | None = 0
    """The bytes saved by nested calls; None if they could not be counted."""
    allocated: int = 0


@dataclass
class _Backward:
    """The backward pass of a call: from its first output gradient to its last input gradient."""

    began: Started | None = None
    ended: Started | None = None
    parameters: Started | None = None
    """The time of the last gradient of a parameter of the module or its submodules."""


@dataclass
class _Thread:
    calls: list[_Forward] = field(default_factory=list)
    counted: set[int] = field(default_factory=set)
    """The sequence numbers of the nodes whose saved tensors were counted."""


class CostTap(GradientTap):
    """Records the time and memory of each module call, as CPU tensors with one number.

    The paths are:

    - ``forward_ms``: the time of the call, including nested calls and excluding the hooks of this tap;
    - ``backward_ms``: the time from the first output gradient to the last input gradient. For a module whose inputs
      need no gradient, it ends with the last gradient of the module's parameters;
    - ``saved_bytes``: the memory that the operations of the call save for the backward pass, excluding parameters,
      buffers and tensors that an earlier call has already saved;
    - ``allocated_bytes``: on a GPU, the largest allocated memory at the beginning or end of the call or of a nested
      call.

    Times on a GPU are measured between two events in its stream. They are recorded when the tap is paused or removed,
    which waits for the GPU. Calls that a checkpoint recomputes are part of the backward pass, and save no memory. Calls
    in compiled code are not measured.

    Args:
        modules: See :class:`~lightning_recorder.taps.Tap`.
        receive: See :class:`~lightning_recorder.taps.Tap`.
        condition: See :class:`~lightning_recorder.taps.Tap`.
        strict: See :class:`~lightning_recorder.taps.Tap`.
        clock: A function that returns the host time in seconds.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        >>> costs = {}
        >>> with CostTap({"0": net[0], "1": net[1]}, lambda site, value: costs.update({site: int(value)})):
        ...     net(torch.ones(2, 4)).sum().backward()
        >>> costs["0", "saved_bytes"], costs["1", "saved_bytes"]  # the input, and the output
        (32, 64)
    """

    _during_backward: ClassVar[bool] = False  # a recomputed call is part of the backward pass

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        receive: Receiver,
        *,
        condition: Callable[[], object] | None = None,
        strict: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(modules, receive, condition=condition, strict=strict)
        self._outputs = _OutputGradients(modules, self._note_output, strict=strict)
        self._inputs_of_calls = _InputGradients(modules, self._note_input, strict=strict)
        self._inner = (self._outputs, self._inputs_of_calls, ParameterGradientTap(modules, self._note_parameter))
        self._clock = clock
        self._watch = Stopwatch(clock=clock)
        self._device = torch.device("cpu")
        self._own: set[int] = set()
        self._seen: set[int] = set()
        self._threads: dict[int, _Thread] = {}
        self._backward: dict[Site, _Backward] = {}
        self._spans: list[tuple[Site, Started, Started]] = []

    @override
    def attach(self) -> None:
        if self._attached:
            return
        tensors = [each for module in self.modules.values() for each in (*parameters_of(module), *buffers_of(module))]
        self._own = {address_of(storage) for each in tensors if (storage := storage_of(each)) is not None}
        self._device = next((each.device for each in tensors), self._device)
        self._watch = Stopwatch(self._device, clock=self._clock)
        for each in self._inner:
            each.eager = self.eager
            each.per_call = not isinstance(each, ParameterGradientTap)
            each.attach()
        super().attach()

    @override
    def pause(self) -> None:
        self._settle()
        super().pause()
        for each in self._inner:
            each.pause()

    @override
    def remove(self) -> None:
        self._settle()
        super().remove()
        for each in self._inner:
            each.remove()
        self._own, self._seen = set(), set()

    @override
    def restart_calls(self) -> None:
        super().restart_calls()
        self._threads.clear()
        self._backward.clear()
        self._seen.clear()

    @override
    def _register(self, name: str, module: nn.Module) -> None:
        begin, end = TapHook(self, name, self._begin), TapHook(self, name, self._end)
        self._keep(hookable(module).register_forward_pre_hook(begin, with_kwargs=True))
        # This hook runs before the hooks of other recorders, so that their time does not count. It also runs if the
        # module raises.
        self._keep(hookable(module).register_forward_hook(end, prepend=True, always_call=True))

    def _of_thread(self) -> _Thread:
        return self._threads.setdefault(threading.get_ident(), _Thread())

    def _begin(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered = self._clock()
        self._inputs_of_calls._enter_call(name, module, args, kwargs)
        calls = self._of_thread().calls
        call = _Forward(name, sequence_number(), self._watch.start(), allocated=self._allocated())
        if calls:
            calls[-1].hooks_ms += 1000 * (call.began.at - entered)
        calls.append(call)

    def _end(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        ended = self._watch.start()
        thread = self._of_thread()
        # A KeyboardInterrupt leaves calls open.
        while thread.calls and thread.calls[-1].name != name:
            thread.calls.pop()
        if not thread.calls:
            return
        call = thread.calls.pop()
        call.allocated = max(call.allocated, self._allocated())
        self._inputs_of_calls._leave_call(name, module, args, output)
        self._outputs._record(name, module, args, output)
        found = tuple(self._tensors(name, output, "out"))
        if found:  # empty if the module has raised
            self._count_saved(call, [tensor for _, tensor in found], thread.counted)
            if call.began.event is None:
                self._give(name, "forward_ms", max(0.0, elapsed_ms(call.began, ended) - call.hooks_ms))
            else:
                self._spans.append((Site(name, "forward_ms"), call.began, ended))
            if call.saved is not None:
                self._give(name, "saved_bytes", call.saved)
            if call.allocated:
                self._give(name, "allocated_bytes", call.allocated)
        if thread.calls:
            around = thread.calls[-1]
            around.allocated = max(around.allocated, call.allocated)
            around.saved = None if around.saved is None or call.saved is None else around.saved + call.saved
            around.hooks_ms += call.hooks_ms + 1000 * (self._clock() - ended.at)

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0

    def _count_saved(self, call: _Forward, outputs: list[Tensor], counted: set[int]) -> None:
        """Add the memory that the nodes of a call keep. Nodes of nested calls have been counted already."""
        roots = [each.grad_fn for each in outputs if each.grad_fn is not None]
        made = sequence_number() - call.first
        if call.saved is None or not roots or not made:
            return
        if not self._may_visit(made):
            call.saved = None
            return
        for node in _nodes_since(roots, call.first):
            number = sequence_number_of(node)
            if number not in counted:
                counted.add(number)
                for tensor in saved_tensors(node):
                    storage = storage_of(tensor)
                    address = 0 if storage is None else address_of(storage)
                    if storage is not None and address not in self._own and address not in self._seen:
                        self._seen.add(address)
                        call.saved += storage.nbytes()

    def _note_output(self, site: Site, grad: Tensor) -> None:
        call = self._backward.setdefault(_call_of(site), _Backward())
        call.began = call.began or self._watch.start()

    def _note_input(self, site: Site, grad: Tensor) -> None:
        self._backward.setdefault(_call_of(site), _Backward()).ended = self._watch.start()

    def _note_parameter(self, site: Site, grad: Tensor) -> None:
        now, parts = self._watch.start(), site.name.split(".")
        for length in range(len(parts) + 1):
            call = self._backward.get(Site(".".join(parts[:length]), ""))
            if call is not None:
                call.parameters = now

    def _settle(self) -> None:
        """Record the times that are known only after the backward pass."""
        if not self._attached:
            return
        for (name, _), call in self._backward.items():
            ended = call.ended or call.parameters
            if call.began is not None and ended is not None:
                self._spans.append((Site(name, "backward_ms"), call.began, ended))
        self._backward.clear()
        spans, self._spans = self._spans, []
        for (name, path), first, last in spans:
            self._guarded(name, None, self._give, path, max(0.0, elapsed_ms(first, last)))

    def _give(self, name: str, path: str, value: float) -> None:
        self._pass_on(name, [(path, torch.tensor(value, dtype=torch.float64, device="cpu"))])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_spans": [], "_backward": {}, "_threads": {}}


def _call_of(site: Site) -> Site:
    """Return the module name and the call number of a gradient, which identify its module call."""
    return Site(site.name, site.path.partition("#")[2])


def _nodes_since(roots: list[Node], first: int) -> Iterator[Node]:
    """Yield the nodes reachable from the roots that were created since a sequence number."""
    seen: set[Node] = set()
    todo = [each for each in roots if sequence_number_of(each) >= first]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            yield node
            todo += [each for each, _ in node.next_functions if each is not None and sequence_number_of(each) >= first]
    if seen:
        GRAPH_NODE_LIMIT.expect_less()
