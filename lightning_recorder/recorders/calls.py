"""The calls of a net's modules: labelled in one run that leaves no trace, and held against it in later ones."""

from __future__ import annotations

import copy
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from lightning_recorder.autograd import in_backward
from lightning_recorder.errors import ArgumentError, RecordingError
from lightning_recorder.hooks import ModuleHook
from lightning_recorder.stance import EagerStance
from lightning_recorder.structure import iter_tensors

__all__ = [
    "Call",
    "CallWatch",
    "Label",
    "Snapshot",
    "arguments",
    "differences",
    "is_uninitialized",
    "label_calls",
    "make_inputs",
    "run_without_trace",
]

Label = tuple[int, int]
"""Depth of a module's name, the root's being 0, and the place of a call among those of its depth, from 1."""

# A message names so many calls of each kind: a net of which another branch ran may differ in hundreds.
_SHOWN = 8


class Call(NamedTuple):
    """One call of a module in a run, called the same in every run."""

    name: str
    """The module's name."""
    number: int
    """The how-many-th call of this module in the run it is, from 1."""

    def __str__(self) -> str:
        return repr(self.name) if self.number == 1 else f"{self.name!r} (call {self.number})"


def label_calls(calls: Iterable[Call]) -> dict[Label, Call]:
    """Label the calls of a run, given in the order in which they began.

    The depth is that of the dotted name, so that a child of a ``ModuleList`` is one deeper than the list.

    Example:
        >>> label_calls([Call("", 1), Call("stem", 1), Call("blocks.0", 1), Call("stem", 2)])
        {(0, 1): Call(name='', number=1), (1, 1): Call(name='stem', number=1), (2, 1): Call(name='blocks.0', number=1),
         (1, 2): Call(name='stem', number=2)}
    """
    counts: dict[int, int] = {}
    labels = {}
    for call in calls:
        depth = call.name.count(".") + 1 if call.name else 0
        counts[depth] = counts.get(depth, 0) + 1
        labels[depth, counts[depth]] = call
    return labels


def differences(labels: Mapping[Label, Call], calls: Sequence[Call]) -> str | None:
    """In which calls a run differs from the labelled one, or ``None``.

    Example:
        >>> differences({(0, 1): Call("", 1), (1, 1): Call("a", 1)}, [Call("", 1), Call("b", 1)])
        "missing (1, 1) 'a'; extra 'b'"
    """
    if list(labels.values()) == list(calls):
        return None
    known, seen = set(labels.values()), set(calls)
    missing = [f"{label} {call}" for label, call in labels.items() if call not in seen]
    extra = [str(call) for call in calls if call not in known]
    parts = [f"{kind} {_shortened(each)}" for kind, each in (("missing", missing), ("extra", extra)) if each]
    if parts:
        return "; ".join(parts)
    # The same calls in another order.
    label, expected, found = next(
        (label, expected, found)
        for (label, expected), found in zip(labels.items(), calls, strict=True)
        if expected != found
    )
    return f"another order: where {label} {expected} was labelled, {found} was called"


def _shortened(entries: Sequence[str]) -> str:
    more = f" and {len(entries) - _SHOWN} more" if len(entries) > _SHOWN else ""
    return ", ".join(entries[:_SHOWN]) + more


class _OpenCall(NamedTuple):
    """A call that is going on."""

    call: Call
    kwargs: dict[str, Any]
    """The dictionary that torch makes for this call and shows to all its hooks."""
    handled: BaseException | None
    """What was being handled when the call began."""


class CallWatch:
    """Sees the calls of modules that this thread makes while the watch is entered.

    A call that ``torch.utils.checkpoint`` repeats inside a backward pass is not a second one. Compiled modules run
    eagerly meanwhile, because hooks on compiled code never fire.

    Args:
        modules: The modules by name. TorchScript modules, which take no hooks, are passed over.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules = modules
        self.calls: list[Call] = []
        """The calls in the order in which they began, those that raised included."""
        self.ended: list[Call] = []
        """The calls in the order in which they ended, without those that raised."""
        self._counts: dict[str, int] = {}
        self._open: list[_OpenCall] = []
        self._handles: list[RemovableHandle] = []
        self._stance = EagerStance()

    def begin(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called when a call begins."""

    def end(self, call: Call, output: Any) -> Any:
        """Called when a call ends, unless it raised; gives another output, or ``None`` for the same."""
        return None

    @property
    def caller(self) -> Call | None:
        """The innermost call that is going on."""
        return self._open[-1].call if self._open else None

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        self._in_backward = in_backward()
        try:
            self._stance.hold()
            for name, module in self.modules.items():
                if not isinstance(module, torch.jit.ScriptModule):
                    before, after = _CallHook(self, name, self._before), _CallHook(self, name, self._after)
                    self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                    self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._open.clear()
        self._stance.release()

    @property
    def _watching(self) -> bool:
        return threading.get_ident() == self._thread and in_backward() == self._in_backward

    def _before(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._counts[name] = self._counts.get(name, 0) + 1
        call = Call(name, self._counts[name])
        self.calls.append(call)
        self.begin(call, args, kwargs)
        self._open.append(_OpenCall(call, kwargs, sys.exc_info()[1]))

    def _after(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        found = next((each for each in reversed(self._open) if each.kwargs is kwargs), None)
        # A call whose beginning was not seen, because another hook raised before.
        if found is None:
            return None
        while self._open.pop() is not found:
            pass
        # This hook is called also after a forward that raised, which the net may survive. What was raised is then being
        # handled, and was not when the call began.
        if sys.exc_info()[1] is not found.handled:
            return None
        self.ended.append(found.call)
        return self.end(found.call, output)


class _CallHook(ModuleHook):
    """A hook of a watch on one module."""

    def __init__(self, watch: CallWatch, name: str, see: Callable[..., Any]) -> None:
        self._watch = watch
        self._name = name
        self._see = see

    def __call__(self, module: nn.Module, *seen: Any) -> Any:
        # Another thread may have found the hook before it was taken off, and call it without the keyword arguments.
        return self._see(self._name, *seen) if self._watch._watching else None


class Snapshot:
    """What a forward pass may change in a net's modules, kept in order to be put back.

    Put back are the attributes of each module, buffers and parameters included, as the objects that they were, and the
    values of buffers and of other tensors among the attributes. The values of parameters are not copied.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._taken: set[nn.Module] = set()
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._values: dict[int, tuple[Tensor, Tensor]] = {}
        for module in modules:
            if not any(is_uninitialized(each) for each in (*module._parameters.values(), *module._buffers.values())):
                self.take(module)

    def take(self, module: nn.Module) -> None:
        """Keep the state of a module; the second time, nothing.

        A lazy module is left out at first, and taken when it has been initialised, right before its first call.
        """
        if module in self._taken:
            return
        self._taken.add(module)
        for table in (vars(module), module._parameters, module._buffers, module._modules):
            self._tables.append((table, dict(table)))
        for tensor in (*module._buffers.values(), *vars(module).values()):
            if isinstance(tensor, Tensor) and not is_uninitialized(tensor):
                self._values.setdefault(id(tensor), (tensor, tensor.detach().clone()))

    def restore(self) -> None:
        """Put everything back."""
        for table, before in self._tables:
            for key in [key for key in table if key not in before]:
                del table[key]
            table.update(before)
        for tensor, values in self._values.values():
            # All of them: BatchNorm writes its running statistics without counting the tensor's version. And past that
            # count, which would make autograd refuse graphs that have saved the tensor.
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.data.copy_(values)


def is_uninitialized(value: object) -> bool:
    """Whether this is a parameter or buffer of a lazy module that has no shape yet."""
    return isinstance(value, Tensor) and is_lazy(value)


def arguments(data: Any, kwargs: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments of the labelling run."""
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ArgumentError(f"input_kwargs takes a dictionary of keyword arguments, got {type(kwargs).__name__}")
    more = dict(kwargs or {})
    if isinstance(data, Mapping):
        return (), {**data, **more}
    if isinstance(data, Tensor):
        return (data,), more
    if isinstance(data, (tuple, list)):
        return tuple(data), more
    raise ArgumentError(
        "input_data takes a tensor, a tuple or list of positional arguments, or a dictionary of keyword arguments, got "
        + type(data).__name__
    )


def make_inputs(net: nn.Module, input_size: Any, dtypes: Any) -> tuple[Tensor, ...]:
    """Tensors of the given shapes: zeros for integers and booleans, else random numbers."""
    sizes = _sizes(input_size)
    tensors = [*net.parameters(), *net.buffers()]
    device = tensors[0].device if tensors else torch.get_default_device()
    default = next((each.dtype for each in tensors if each.dtype.is_floating_point), torch.get_default_dtype())
    if isinstance(dtypes, (tuple, list)):
        each_dtype: list[Any] = list(dtypes)
    else:
        each_dtype = [default if dtypes is None else dtypes] * len(sizes)
    if len(each_dtype) != len(sizes) or not all(isinstance(each, torch.dtype) for each in each_dtype):
        raise ArgumentError(f"dtypes takes a torch.dtype, or one for each of the {len(sizes)} inputs, got {dtypes!r}")
    # One of its own, so that nobody else's numbers change.
    generator = torch.Generator().manual_seed(0)
    return tuple(
        (
            torch.rand(size, generator=generator, device="cpu", dtype=torch.float32)
            if dtype.is_floating_point or dtype.is_complex
            else torch.zeros(size, device="cpu")
        ).to(device, dtype)
        for size, dtype in zip(sizes, each_dtype, strict=True)
    )


def _sizes(input_size: Any) -> list[tuple[int, ...]]:
    """Each shape of one or several."""
    sequence = isinstance(input_size, (tuple, list))
    several = sequence and len(input_size) > 0 and all(isinstance(size, (tuple, list)) for size in input_size)
    sizes = list(input_size) if several else [input_size]
    for size in sizes:
        # An empty list is no list of shapes; the shape of a scalar is an empty tuple.
        valid = isinstance(size, (tuple, list)) and size != []
        if not valid or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in size):
            raise ArgumentError(
                f"input_size takes a shape, as in (1, 3), or a list of shapes, none negative; got {input_size!r}"
            )
    return [tuple(size) for size in sizes]


def run_without_trace(
    net: nn.Module, watch: CallWatch, snapshot: Snapshot, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Run the net once in its current mode, without autograd, and put everything back, also if it raises.

    Args:
        net: The net.
        watch: Entered while the net runs.
        snapshot: Of the net's modules; restored afterwards.
        args: Its arguments; the net is given copies.
        kwargs: Its keyword arguments, likewise.

    Raises:
        RecordingError: From the net's own error; names the module in which it was raised.
    """
    with torch.no_grad():
        copies = _own_copies({**dict(enumerate(args)), **kwargs})
        args, kwargs = tuple(copies[index] for index in range(len(args))), {key: copies[key] for key in kwargs}
        tensors = (*net.parameters(), *net.buffers(), *(tensor for _, tensor in iter_tensors((args, kwargs))))
        try:
            with _same_random_numbers({tensor.device for tensor in tensors}), watch:
                net(*args, **kwargs)
        except Exception as error:
            module, where = _raised_in(error, watch.modules) or (net, "the net itself")
            message = f"the labelling run failed in {where} ({type(module).__name__}): {type(error).__name__}: {error}"
            raise RecordingError(message) from error
        finally:
            snapshot.restore()


def _own_copies(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Copies with tensors that the net may write to."""
    # copy.deepcopy refuses tensors that autograd has computed, so it is told beforehand what to put in their place.
    # What is given twice stays one: attention asks whether its query is its key.
    tensors = [tensor for _, tensor in iter_tensors(values)]
    memo = {id(each): each.detach().clone().requires_grad_(each.requires_grad) for each in tensors}
    return {key: _copied(value, memo) for key, value in values.items()}


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # noqa: BLE001 - an object may refuse to be copied in any way; it is then given as it is
        return value


@contextmanager
def _same_random_numbers(devices: Iterable[torch.device]) -> Iterator[None]:
    """Leave the generators of torch, Python and NumPy as they were."""
    places: dict[str, set[int]] = {}
    for device in devices:
        if device.type not in ("cpu", "meta"):
            places.setdefault(device.type, set()).add(device.index or 0)
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the global one is what nets draw from
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([]))
        for kind, indices in places.items():
            stack.enter_context(torch.random.fork_rng(sorted(indices), device_type=kind))
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002 - see above


def _raised_in(error: BaseException, modules: Mapping[str, nn.Module]) -> tuple[nn.Module, str] | None:
    """The innermost of the modules in whose method an error was raised, and how to call it."""
    names = {id(module): name for name, module in modules.items()}
    found = None
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and names.get(id(owner)):
            found = owner, f"module {names[id(owner)]!r}"
        trace = trace.tb_next
    return found
