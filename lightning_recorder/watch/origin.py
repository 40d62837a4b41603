"""A trace of a step that finds the operation from which its first bad value came."""

from __future__ import annotations

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
    sequence_number,
    sequence_number_of,
)
from lightning_recorder.internals.compiled import EagerStance
from lightning_recorder.internals.hooks import ModuleHook
from lightning_recorder.internals.storage import address_of, storage_of
from lightning_recorder.structure import iter_tensors

__all__ = ["CommunicationError", "Origin", "OriginTrace"]

_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parent.parent)
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_UNFILLED = ("empty", "new_empty", "resize", "set_")  # memory that nothing has been written to may hold anything
# With an infinity as an argument, these make a mask.
_FILLING = ("full", "full_like", "new_full", "fill", "masked_fill", "index_fill", "where", "constant_pad_nd", "scatter")


class CommunicationError(RecorderError, RuntimeError):
    """A step communicates with other processes, so a single process cannot run it again."""


@dataclass(frozen=True)
class Origin:
    """The place where the first bad value of a step arose.

    Args:
        module: The name of the module; ``""`` for the code of the step itself.
        call: The number of the call of the module in the step, from 1; 0 outside of a module.
        backward: True if it arose in the backward pass.
        operation: The operation, such as ``"log"``; in the backward pass, the operation whose gradient was computed.
            Empty if it is unknown.
        line: The line of code of the operation, or of the operation whose backward pass it is; may be empty.
        source: The tensor that was already bad, such as ``"batch[0]"`` or ``"parameter head.weight"``; empty if the
            inputs were finite.
        kind: ``"NaN"``, or ``"inf"`` if there was no NaN.
        count: The number of bad values.
        has_bad_input: True if an input of the operation was already infinite, for example by a mask.
    """

    module: str
    call: int
    backward: bool
    operation: str
    line: str
    source: str
    kind: str
    count: int
    has_bad_input: bool = False


@dataclass(frozen=True)
class _Place:
    module: str = ""
    call: int = 0
    line: str = ""
    node: str = ""
    """The operation whose backward pass runs."""
    number: int = -1
    """The sequence number of the node of the operation."""


@dataclass(frozen=True)
class _Event:
    """An operation with a bad result, or a bad tensor that was there before the step."""

    place: _Place
    backward: bool
    operation: str
    source: str
    count: int
    is_nan: bool
    is_explicit: bool
    """True if it filled in an infinity that the code names, such as that of a mask."""
    causes: tuple[int, ...]
    adds: bool = False
    """True if an operation on single elements made one bad that was finite in its inputs."""


class OriginTrace(TorchDispatchMode):
    """Traces a forward and backward pass, and finds the operation from which its first bad value came.

    Every operation is seen below autograd. If its result is not finite, the operations that made its bad inputs are its
    causes. The origin is the first operation without a cause among those that lead to the bad loss or gradient. A mask
    of minus infinity is no origin if something else is.

    Args:
        modules: The modules by name.
        known: Tensors that exist before the step, by description, such as ``"parameter head.weight"``.

    Raises:
        CommunicationError: From an operation of the step that communicates with other processes.

    Note:
        Reads values of every operation, so it waits for the device, and takes several times as long as the bare step.

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
        self._bad: dict[int, int] = {}  # the event that made the memory at an address bad
        self._alive: list[Tensor] = []  # bad tensors, so that no other tensor gets their address
        self._stack: list[_Place] = []
        self._calls: Counter[str] = Counter()
        self._repeated: Counter[str] = Counter()
        self._nodes: dict[int, _Place] = {}
        self._results: dict[int, int] = {}  # the event of the forward pass of a node, by its sequence number
        self._resources = ExitStack()
        self.errors: list[Exception] = []
        """The errors of the trace itself. An operation whose check failed counts as finite."""

    @override
    def __enter__(self) -> Self:
        stance = EagerStance()
        stance.hold()
        self._resources.callback(stance.release)
        for name, module in self._modules.items():
            if not isinstance(module, torch.jit.ScriptModule):
                enter = module.register_forward_pre_hook(_Enter(self, name), prepend=True)
                leave = module.register_forward_hook(_Leave(self, name), always_call=True)
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
        """Return the origin of the first bad value that led to one of the tensors; ``None`` if they are finite.

        Args:
            symptoms: The loss, or the gradients of the parameters.
        """
        tensors = [symptoms] if isinstance(symptoms, Tensor) else symptoms
        ends = [self._find(each) for each in tensors if each is not None and _bad_count(each)[0]]
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
        events = [self._events[index] for index in chain]
        roots = [each for each in events if not each.causes and not each.is_explicit]
        # If a mask is all there was before, the first operation that did more than pass it on.
        others = [each for each in events if each.is_nan or each.adds]
        event = next(iter(roots or others or events))
        # A function may hide an infinity from the loss, such as tanh, but not from the gradient.
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
        )

    # Operations.

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _COLLECTIVES:
            raise CommunicationError(f"the step communicates with other processes ({func})")
        place = self._place()
        causes = self._guarded(self._causes, args, kwargs) if func._schema.is_mutable else None
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
        name = func.__name__.partition(".")[0]
        if name.startswith(_UNFILLED) or _is_view_operation(func):
            return
        for tensor in _floating((result,)):
            count, is_nan = _bad_count(tensor)
            address = _address(tensor)
            if not count:
                self._bad.pop(address, None)
                continue
            if causes is None:
                causes = self._causes(args, kwargs)
            fills = name.strip("_") in _FILLING
            explicit = not is_nan and not causes and fills and _has_infinity((args, kwargs))
            adds = bool(causes) and not fills and torch.Tag.pointwise in func.tags and _adds(tensor, args)
            backward = in_backward() and not self._stack
            event = _Event(place, backward, name.strip("_"), "", count, is_nan, explicit, causes, adds)
            index = self._add(tensor, event)
            if not backward:
                self._results.setdefault(place.number, index)

    def _causes(self, args: Any, kwargs: Any) -> tuple[int, ...]:
        """Return the events that made the bad ones among the inputs."""
        found = []
        for tensor in _floating((args, kwargs)):
            if _bad_count(tensor)[0]:
                index = self._bad.get(_address(tensor), self._known_event(tensor))
                found.append(self._unknown(tensor) if index is None else index)
        return tuple(dict.fromkeys(found))

    def _known_event(self, tensor: Tensor) -> int | None:
        source = self._known.get(_address(tensor))
        return None if source is None else self._existing(tensor, source)

    def _unknown(self, tensor: Tensor) -> int:
        return self._existing(tensor, "")

    def _existing(self, tensor: Tensor, source: str) -> int:
        """Add a tensor that no traced operation has made."""
        count, is_nan = _bad_count(tensor)
        # A constant with infinities alone, such as the buffer of a mask, is meant to have them.
        explicit = not is_nan and not source.startswith(("batch", "parameter"))
        place = self._stack[-1] if self._stack else _Place()
        return self._add(tensor, _Event(place, in_backward(), "", source, count, is_nan, explicit, ()))

    def _add(self, tensor: Tensor, event: _Event) -> int:
        self._events.append(event)
        self._alive.append(tensor.detach())
        self._bad[_address(tensor)] = len(self._events) - 1
        return len(self._events) - 1

    # Places.

    def _place(self) -> _Place:
        """Return the place of the current operation, and note it for the backward pass of the operation."""
        if in_backward() and not self._stack:
            node = current_node()
            place = replace(self._behind(node), node=_operation_of(node)) if node is not None else _Place()
        else:
            inner = self._stack[-1] if self._stack else _Place()
            # Autograd makes the node of an operation before it runs the operation.
            place = _Place(inner.module, inner.call, _line(), number=sequence_number() - 1)
        if torch.is_grad_enabled():
            self._nodes.setdefault(sequence_number() - 1, place)
        return place

    def _behind(self, node: Any) -> _Place:
        number = sequence_number_of(node)
        if number == LEAF_NUMBER:
            return _Place()
        # A node whose forward pass ran no operation belongs to the operation before it.
        known = self._nodes.get(number)
        if known is None:
            before = [each for each in self._nodes if each < number]
            known = self._nodes[max(before)] if before else _Place()
        return known

    def enter(self, name: str) -> None:
        """Begin a call of a module."""
        if in_backward():  # checkpointing repeats the call; the last one comes first
            call = max(1, self._calls[name] - self._repeated[name])
            self._repeated[name] += 1
        else:
            self._calls[name] += 1
            call = self._calls[name]
        self._stack.append(_Place(name, call, ""))
        # The nodes that the module makes without an operation, such as those of a custom function, are its own.

    def leave(self, name: str, output: Any) -> None:
        """End a call of a module, and look for bad outputs that no traced operation has made."""
        while self._stack and self._stack[-1].module != name:  # a repeated call that was stopped early
            self._stack.pop()
        if self._stack:
            self._guarded(self._check_output, output)
            self._stack.pop()

    def _check_output(self, output: Any) -> None:
        for _, tensor in iter_tensors(output):
            address = _address(tensor)
            if not _is_checkable(tensor) or address in self._bad or address in self._known:
                continue
            count, is_nan = _bad_count(tensor)
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


def _floating(values: Any) -> Iterator[Tensor]:
    """Yield the tensors with floating-point numbers in the arguments or the result of an operation."""
    todo = list(values)
    while todo:
        value = todo.pop(0)
        if isinstance(value, Tensor):
            if _is_checkable(value):
                yield value
        elif isinstance(value, (list, tuple)):
            todo += value
        elif isinstance(value, dict):
            todo += value.values()


def _is_checkable(tensor: Tensor) -> bool:
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return is_number and not is_transformed(tensor) and tensor.device.type != "meta"


def _bad_count(tensor: Tensor) -> tuple[int, bool]:
    """Return the number of values that are not finite, and True if there is a NaN."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.to_dense()
    finite = torch.isfinite(tensor)
    if not tensor.numel() or bool(finite.all()):
        return 0, False
    return int(finite.numel() - int(finite.sum())), bool(torch.isnan(tensor).any())


def _adds(result: Tensor, args: Any) -> bool:
    """Return True if an element of the result is bad and no element of the inputs at its place is."""
    new = ~torch.isfinite(result.detach())
    for tensor in _floating(args):
        new = new & torch.isfinite(tensor.detach()).broadcast_to(new.shape)
    return bool(new.any())


def _address(tensor: Tensor) -> int:
    storage = storage_of(tensor)
    return 0 if storage is None else address_of(storage)


def _is_view_operation(func: Any) -> bool:
    """Return True if the operation only returns a view of its input."""
    schema = func._schema
    return not schema.is_mutable and any(each.alias_info is not None for each in schema.returns)


def _has_infinity(values: Any) -> bool:
    """Return True if a number among the arguments is infinite, or a tensor without dimensions is."""
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


def _operation_of(node: Any) -> str:
    """Return the operation of a node of the backward graph, such as ``"sqrt"`` for ``SqrtBackward0``."""
    name = re.sub(r"Backward\d*$", "", str(node.name()).rpartition(".")[2])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _line() -> str:
    """Return the line of the innermost code that belongs neither to torch nor to this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, _OWN, "<")):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
