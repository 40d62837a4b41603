"""Trace a step to find the operation that produced its first bad value."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import Self, override

from lightning_recorder.errors import RecorderError
from lightning_recorder.internals.autograd import (
    LEAF_NUMBER,
    current_node,
    in_backward,
    is_transformed,
    is_wrapped_for_backward,
    sequence_number,
    sequence_number_of,
)
from lightning_recorder.internals.compiled import EagerStance
from lightning_recorder.internals.hooks import ModuleHook
from lightning_recorder.internals.module_tree import hookable, is_scripted
from lightning_recorder.internals.storage import address_of, storage_of
from lightning_recorder.notebook import cell_or_path
from lightning_recorder.structure import ignore_unknown, iter_tensors

__all__ = ["CommunicationError", "Origin", "OriginTrace"]


def bad_count(tensor: Tensor) -> tuple[int, bool]:
    """Return the number of values that are not finite, and True if there is a NaN."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.to_dense()
    finite = torch.isfinite(tensor)
    if not tensor.numel() or bool(finite.all()):
        return 0, False
    return int(finite.numel() - int(finite.sum())), bool(torch.isnan(tensor).any())


def adds(result: Tensor, args: Any) -> bool:
    """Return True if an element of the result is not finite although the inputs are finite at the same index."""
    new = ~torch.isfinite(result.detach())
    for tensor in floating(args):
        new = new & torch.isfinite(tensor.detach()).broadcast_to(new.shape)
    return bool(new.any())


def floating(values: Any) -> Iterator[Tensor]:
    """Yield the tensors with floating-point numbers in the arguments or the result of an operation."""
    return filter(is_checkable, _tensors(values))


def _tensors(values: Any) -> Iterator[Tensor]:
    todo = list(values)
    while todo:
        value = todo.pop(0)
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            todo += value
        elif isinstance(value, dict):
            todo += value.values()


def is_checkable(tensor: Tensor) -> bool:
    """Return True if a tensor has floating-point or complex numbers that can be read."""
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return is_number and not is_transformed(tensor) and tensor.device.type != "meta"


def has_infinity(values: Any) -> bool:
    """Return True if a Python number among the arguments is infinite, also in nested containers."""
    todo = list(values)
    while todo:
        value = todo.pop()
        if isinstance(value, float) and value in (float("inf"), float("-inf")):
            return True
        if isinstance(value, (list, tuple)):
            todo += value
        elif isinstance(value, dict):
            todo += value.values()
    return False


_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parent.parent)
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_UNFILLED = ("empty", "new_empty", "resize", "set_")  # these return uninitialized memory, which may hold any value
# With an infinity as an argument, these operations make a mask.
_FILLING = re.compile("full|full_like|new_full|(masked_|index_)?fill|scalar_tensor|where|constant_pad_nd|scatter")
_WRITES_INPUTS = "batch_norm"  # updates the running statistics, although its schema does not say so


class CommunicationError(RecorderError, RuntimeError):
    """A step communicates with other processes, so a single process cannot run it again."""


@dataclass(frozen=True)
class Origin:
    """The operation or tensor in which the first bad value of a step appeared."""

    module: str  # the name of the module; ``""`` for the code of the step itself
    call: int  # the number of the call of the module in the step, from 1; 0 outside of a module
    backward: bool  # True if the bad value appeared in the backward pass
    # The operation, such as ``"log"``; in the backward pass, the operation whose gradient was computed. Empty if it is
    # unknown.
    operation: str
    line: str  # the line of code of the operation or, in the backward pass, of the forward operation; may be empty
    # the tensor that was bad before the step, such as ``"batch[0]"`` or ``"parameter head.weight"``; empty if the
    # inputs were finite
    source: str
    kind: str  # ``"NaN"``, or ``"inf"`` if there was no NaN
    count: int  # the number of bad values
    has_bad_input: bool = False  # True if an input of the operation was already infinite, for example by a mask
    # True if the bad value comes from an input that no operation of the step made, such as a constant
    has_constant: bool = False
    ranges: str = ""  # the ranges of the finite inputs of an operation of the forward pass, such as ``"-1 to 3"``


@dataclass(frozen=True)
class _Place:
    module: str = ""
    call: int = 0
    line: str = ""
    node: str = ""
    """The operation whose backward pass is running."""
    number: int = -1
    """The sequence number of the operation's autograd node."""


@dataclass(frozen=True)
class _Event:
    """An operation with a bad result, or a bad tensor that existed before the step."""

    place: _Place
    backward: bool
    operation: str
    source: str
    count: int
    is_nan: bool
    is_explicit: bool
    """True if the code asked for the infinity, as for a mask."""
    causes: tuple[int, ...]
    is_negative: bool = False
    """True if all bad values are minus infinity, as in the logarithm of a mask."""
    is_constant: bool = False
    """True if no traced operation made the tensor. The event then names the operation that used it."""
    ranges: str = ""
    """The ranges of the inputs, if these were finite and the operation has not written to them."""
    adds: bool = False
    """True if an elementwise operation returned a bad element although the inputs were finite at its index."""


class OriginTrace(TorchDispatchMode):
    """Traces a forward and backward pass, and finds the operation that produced its first bad value.

    Every operation is traced below autograd. If a result is not finite, its causes are the operations that made the bad
    inputs. The origin is the first operation without a cause among the operations that lead to the bad loss or
    gradient. A mask of minus infinity is only returned if there is no other origin.

    The keys of ``modules`` and ``known`` are the names in the result. ``known`` has the tensors that exist before the
    step.

    Raises:
        CommunicationError: From an operation of the step that communicates with other processes.

    Note:
        Reads the result of every operation and waits for the device, so a step takes several times as long.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> inputs = torch.tensor([[1.0, -1.0]])
        >>> with OriginTrace(dict(net.named_children()), {"batch": inputs}) as trace:
        ...     loss = (net(inputs) - 1e9).relu().log().sum()
        >>> origin = trace.origin(loss)
        >>> origin.operation, origin.kind, origin.backward
        ('log', 'inf', False)
    """

    def __init__(self, modules: Mapping[str, nn.Module], known: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotations there
        self._modules = modules
        self._known = {address: name for name, each in known.items() if (address := _address(each))}
        self._events: list[_Event] = []
        self._bad: dict[int, int] = {}  # by memory address, the index of the event that wrote the bad values
        self._alive: list[Tensor] = []  # bad tensors, so that no other tensor gets their address
        self._stack: list[_Place] = []
        self._calls: Counter[str] = Counter()
        self._repeated: Counter[str] = Counter()
        self._nodes: dict[int, _Place] = {}
        self._starts: dict[int, _Place] = {}  # by sequence number, the places of nodes at the start or end of a call
        self._results: dict[int, int] = {}  # by the sequence number of a node, the event of its forward pass
        self._resources = ExitStack()
        self.errors: list[Exception] = []
        """The errors of the trace itself. An operation whose check failed counts as finite."""

    @override
    def __enter__(self) -> Self:
        stance = EagerStance()
        stance.hold()
        self._resources.callback(stance.release)
        for name, module in self._modules.items():
            if not is_scripted(module):
                enter = hookable(module).register_forward_pre_hook(_Enter(self, name), prepend=True)
                leave = hookable(module).register_forward_hook(_Leave(self, name), always_call=True)
                self._resources.callback(enter.remove)
                self._resources.callback(leave.remove)
        super().__enter__()  # type: ignore[no-untyped-call]  # torch has no annotations there
        return self

    @override
    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]  # torch has no annotations there
        finally:
            self._resources.close()

    def origin(self, symptoms: Tensor | Iterable[Tensor | None]) -> Origin | None:
        """Return the origin of the first bad value that led to one of the tensors; ``None`` if all are finite."""
        tensors = [symptoms] if isinstance(symptoms, Tensor) else symptoms
        ends = [self._find(each) for each in tensors if each is not None and bad_count(each)[0]]
        if not ends:
            return None
        chain: set[int] = set()
        todo = [end for end in ends if end is not None]
        while todo:
            index = todo.pop()
            if index not in chain:
                chain.add(index)
                todo += self._events[index].causes
        return self._chosen(sorted(chain)) if chain else None

    def _find(self, tensor: Tensor) -> int | None:
        return self._bad.get(_address(tensor), self._known_event(tensor))

    def _chosen(self, chain: list[int]) -> Origin:
        event = self._first_of(chain)
        # Functions such as tanh hide an infinity from the loss, but not from the gradient. The origin of a bad gradient
        # may therefore be in the forward pass.
        earlier = self._results.get(event.place.number) if event.backward else None
        if earlier is not None and not self._events[earlier].is_explicit and not self._events[earlier].causes:
            event = self._events[earlier]
        kind = "NaN" if event.is_nan else "inf"
        place = event.place
        # The values of a batch belong to no module.
        is_batch = event.source.startswith("batch")
        return Origin(
            "" if is_batch else place.module,
            0 if is_batch else place.call,
            event.backward,
            place.node or event.operation,
            place.line,
            event.source,
            kind,
            event.count,
            has_bad_input=bool(event.causes),
            has_constant=event.is_constant,
            ranges=event.ranges,
        )

    def _first_of(self, chain: list[int]) -> _Event:
        """Return the first event of a chain that is neither a mask nor caused by another event."""
        masks: set[int] = set()  # the events that made the infinities of masks or only passed infinities on
        found: list[_Event] = []
        for index in chain:
            event = self._events[index]
            passes_on = bool(event.causes) and not event.is_nan and not event.adds
            if not masks.issuperset(event.causes):
                continue
            if event.is_explicit or passes_on:
                masks.add(index)
            else:
                found.append(event)
        certain = [each for each in found if not each.is_negative]
        return next(iter(certain or found), self._events[chain[0]])

    # Operations.

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _COLLECTIVES:
            raise CommunicationError(f"the step communicates with other processes ({func})")
        place = self._place()
        writes = func._schema.is_mutable or _WRITES_INPUTS in func.__name__
        causes = self._guarded(self._causes, func, place, args, kwargs) if writes else None
        result = func(*args, **kwargs)
        self._guarded(self._check, func, place, causes, args, kwargs, result)
        return result

    def _guarded(self, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:  # noqa: BLE001 - the check must not break the operation
            self.errors.append(error)
            return None

    def _check(self, func: Any, place: _Place, causes: Any, args: Any, kwargs: Any, result: Any) -> None:
        name: str = func.__name__.partition(".")[0]
        if name.startswith(_UNFILLED) or _is_view_operation(func):
            return
        for tensor in floating((result,)):
            count, is_nan = bad_count(tensor)
            address = _address(tensor)
            if not count:
                self._bad.pop(address, None)
                continue
            if causes is None:
                causes = self._causes(func, place, args, kwargs)
            name = name.strip("_")
            fills = _FILLING.fullmatch(name) is not None
            explicit = not is_nan and not causes and fills and has_infinity((args, kwargs))
            more = bool(causes) and not fills and torch.Tag.pointwise in func.tags and adds(tensor, args)
            negative = not is_nan and not causes and int((tensor.detach() == -math.inf).sum()) == count
            backward = self._is_backward()
            is_lost = bool(causes) or backward or func._schema.is_mutable
            ranges = "" if is_lost else self._guarded(_ranges, (args, kwargs)) or ""
            event = _Event(
                place, backward, name, "", count, is_nan, explicit, causes, negative, ranges=ranges, adds=more
            )
            index = self._add(tensor, event)
            if not backward:
                self._results.setdefault(place.number, index)

    def _is_backward(self) -> bool:
        return in_backward() and not self._stack

    def _causes(self, func: Any, place: _Place, args: Any, kwargs: Any) -> tuple[int, ...]:
        """Return the events that made the bad inputs of an operation."""
        found = []
        for tensor in floating((args, kwargs)):
            if bad_count(tensor)[0]:
                index = self._bad.get(_address(tensor), self._known_event(tensor))
                found.append(self._constant(func, place, tensor) if index is None else index)
        return tuple(dict.fromkeys(found))

    def _known_event(self, tensor: Tensor) -> int | None:
        """Add an event for a bad tensor if the tensor existed before the step. Return its index, or None."""
        source = self._known.get(_address(tensor))
        if source is None:
            return None
        place, (count, is_nan) = self._stack[-1] if self._stack else _Place(), bad_count(tensor)
        explicit = not is_nan and not source.startswith(("batch", "parameter"))
        return self._add(tensor, _Event(place, in_backward(), "", source, count, is_nan, explicit, ()))

    def _constant(self, func: Any, place: _Place, tensor: Tensor) -> int:
        """Add an event for a bad input that no traced operation has made. Return its index."""
        count, is_nan = bad_count(tensor)
        # A constant with infinities but without NaN has them on purpose, as a mask does.
        name, explicit = func.__name__.partition(".")[0].strip("_"), not is_nan
        event = _Event(place, self._is_backward(), name, "", count, is_nan, explicit, (), is_constant=True)
        return self._add(tensor, event)

    def _add(self, tensor: Tensor, event: _Event) -> int:
        self._events.append(event)
        self._alive.append(tensor.detach())
        self._bad[_address(tensor)] = len(self._events) - 1
        return len(self._events) - 1

    # Places.

    def _place(self) -> _Place:
        """Return the module call and the line of the current operation, and keep them for its backward pass."""
        if in_backward() and not self._stack:
            node = current_node()
            place = replace(self._behind(node), node=_operation_of(node)) if node is not None else _Place()
        else:
            inner = self._stack[-1] if self._stack else _Place()
            # Autograd creates the node of an operation before it runs the operation, so the last number is the node's.
            place = _Place(inner.module, inner.call, line_of_user(), number=sequence_number() - 1)
        if torch.is_grad_enabled():
            self._nodes.setdefault(sequence_number() - 1, place)
        return place

    def _behind(self, node: Any) -> _Place:
        number = sequence_number_of(node)
        if number == LEAF_NUMBER:
            # At the node of a leaf, only hooks of the parameter run operations.
            variable = getattr(node, "variable", None)
            source = "" if variable is None else self._known.get(_address(variable), "")
            name = source.removeprefix("parameter ")
            return _Place(name.rpartition(".")[0], 1, line_of_user()) if name != source else _Place()
        # If the forward pass of a node ran no operation, as for a backward hook, the node belongs to the module call
        # that began directly before it, or else to the operation before it.
        known = self._nodes.get(number, self._starts.get(number))
        if known is None:
            before = [each for each in self._nodes if each < number]
            known = self._nodes[max(before)] if before else _Place()
        return known

    def enter(self, name: str) -> None:
        """Begin a call of a module."""
        if in_backward():  # checkpointing repeats the calls in reverse order
            call = max(1, self._calls[name] - self._repeated[name])
            self._repeated[name] += 1
        else:
            self._calls[name] += 1
            call = self._calls[name]
        self._stack.append(_Place(name, call, ""))
        self._starts[sequence_number()] = self._stack[-1]

    def leave(self, name: str, output: Any) -> None:
        """End a call of a module, and check its output for bad values that no traced operation has made."""
        while self._stack and self._stack[-1].module != name:  # a repeated call that was stopped early
            self._stack.pop()
        if self._stack:
            self._guarded(self._check_output, output)
            ended = self._stack.pop()
            around = self._stack[-1] if self._stack else _Place()
            self._starts[sequence_number()] = ended if is_wrapped_for_backward(self._modules[name]) else around

    def _check_output(self, output: Any) -> None:
        for _, tensor in iter_tensors(output, unknown=ignore_unknown):
            address = _address(tensor)
            if not is_checkable(tensor) or address in self._bad or address in self._known:
                continue
            count, is_nan = bad_count(tensor)
            if count:
                self._add(tensor, _Event(self._stack[-1], False, "", "", count, is_nan, False, ()))


class _Enter(ModuleHook):
    def __init__(self, trace: OriginTrace, name: str) -> None:
        self._trace, self._name = trace, name

    def __call__(self, module: nn.Module, args: Any) -> None:
        self._trace.enter(self._name)


class _Leave(_Enter):
    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        self._trace.leave(self._name, output)


def _ranges(values: Any) -> str:
    """Return the ranges of the tensors in the arguments of an operation, with their positions if there are several."""
    found = []
    for place, each in enumerate(_tensors(values)):
        if is_checkable(each) and each.numel() and not each.is_complex():
            low, high = (f"{float(bound) + 0.0:.3g}" for bound in each.detach().double().aminmax())  # no -0
            found.append((_PLACES[min(place, 2)].format(place + 1), low if low == high else f"{low} to {high}"))
    return ", ".join(map(" ".join, found)) if len(found) > 1 else "".join(text for _, text in found)


_PLACES = ("first input", "second input", "input {}")


def _address(tensor: Tensor) -> int:
    storage = storage_of(tensor)
    return 0 if storage is None else address_of(storage)


def _is_view_operation(func: Any) -> bool:
    """Return True if the operation only returns a view of its input."""
    schema = func._schema
    return not schema.is_mutable and any(each.alias_info is not None for each in schema.returns)


def _operation_of(node: Any) -> str:
    """Return the operation of a node of the backward graph: ``"sqrt"`` for ``SqrtBackward0``, ``"hook"`` for hooks."""
    name = re.sub(r"Backward\d*$", "", str(node.name()).rpartition("::")[2].rpartition(".")[2])
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return {"backward_hook_function": "hook", "accumulate_grad": "hook"}.get(name, name)


def line_of_user() -> str:
    """Return the line of the innermost code that belongs neither to torch nor to this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = cell_or_path(frame.f_code.co_filename)
        if not file.startswith((_TORCH, _OWN, "<")):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
