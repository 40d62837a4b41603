"""Module calls of one run: labels, observation and comparison, and the run that labels them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from lightning_recorder.errors import RecordingError
from lightning_recorder.internals.autograd import in_backward
from lightning_recorder.internals.compiled import EagerStance
from lightning_recorder.internals.hooks import ModuleHook
from lightning_recorder.internals.pause_recording import pause_recording
from lightning_recorder.internals.preserve_state import ModuleState, own_copies, same_gradients, same_random_numbers
from lightning_recorder.structure import iter_tensors

__all__ = ["Call", "CallWatch", "Label", "differences", "label_calls", "run_without_trace"]

Label = tuple[int, int]
"""A pair of the depth of a module's name, 0 for the root, and the position of a call among those at its depth, from 1.
"""

# The maximum number of calls of each kind in a message: a net that took another branch may differ in hundreds.
_SHOWN = 8


class Call(NamedTuple):
    """One call of a module in a run, identified in the same way in every run."""

    name: str
    """The module's name."""
    number: int
    """The ordinal of the call among those of this module in the run, from 1."""

    def __str__(self) -> str:
        return repr(self.name) if self.number == 1 else f"{self.name!r} (call {self.number})"


def label_calls(calls: Iterable[Call]) -> dict[Label, Call]:
    """Label the calls of a run, given in the order in which they began.

    The depth is that of the dotted name, so a child of a ``ModuleList`` is one deeper than the list.

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
    """Describe the differences between the calls of a run and the labeled ones, or return ``None`` if there are none.

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
    # The same calls in a different order.
    label, expected, found = next(
        (label, expected, found)
        for (label, expected), found in zip(labels.items(), calls, strict=True)
        if expected != found
    )
    return f"another order: {label} was {expected} when it was labeled, and now is {found}"


def _shortened(entries: Sequence[str]) -> str:
    more = f" and {len(entries) - _SHOWN} more" if len(entries) > _SHOWN else ""
    return ", ".join(entries[:_SHOWN]) + more


class _OpenCall(NamedTuple):
    """A call in progress."""

    call: Call
    kwargs: dict[str, Any]
    """The dictionary that torch creates for this call and passes to all its hooks."""
    handled: BaseException | None
    """The exception that was being handled when the call began."""


class CallWatch:
    """Observe the module calls of this thread while the context is active.

    A call that ``torch.utils.checkpoint`` repeats inside a backward pass is not counted again. Compiled modules run
    eagerly meanwhile, because hooks on compiled code never fire.

    Args:
        modules: The modules by name. TorchScript modules, which do not support these hooks, are ignored.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules = modules
        self.calls: list[Call] = []
        """The calls in the order in which they began, including those that raised."""
        self.ended: list[Call] = []
        """The calls in the order in which they ended, excluding those that raised."""
        self._counts: dict[str, int] = {}
        self._open: list[_OpenCall] = []
        self._handles: list[RemovableHandle] = []
        self._stance = EagerStance()

    def begin(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Handle the start of a call."""

    def end(self, call: Call, output: Any) -> Any:
        """Handle the end of a call that did not raise; return a replacement output, or ``None`` to keep the output."""
        return None

    @property
    def caller(self) -> Call | None:
        """The innermost call in progress."""
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
        # The start of the call was not seen because another hook raised before.
        if found is None:
            return None
        while self._open.pop() is not found:
            pass
        # This hook also runs after a forward that raised, which the net may catch. That exception is then being
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
        # Another thread may have fetched the hook before its removal, and may call it without the keyword arguments.
        return self._see(self._name, *seen) if self._watch._watching else None


def run_without_trace(
    net: nn.Module, watch: CallWatch, snapshot: ModuleState, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Run the net once in its current mode, without autograd, and restore everything afterwards, even if it raises.

    Args:
        net: The net.
        watch: The watch that is active while the net runs.
        snapshot: The snapshot of the net's modules, restored afterwards.
        args: The positional arguments; the net receives copies.
        kwargs: The keyword arguments; the net receives copies.

    Raises:
        RecordingError: If the net raises; names the module that raised.
    """
    with pause_recording():
        copies = own_copies({**dict(enumerate(args)), **kwargs})
        args, kwargs = tuple(copies[index] for index in range(len(args))), {key: copies[key] for key in kwargs}
        tensors = (*net.parameters(), *net.buffers(), *(tensor for _, tensor in iter_tensors((args, kwargs))))
        try:
            with same_gradients(tensors), same_random_numbers({tensor.device for tensor in tensors}), watch:
                net(*args, **kwargs)
        except Exception as error:
            module, where = _raised_in(error, watch.modules) or (net, "the net itself")
            message = f"the labeling run failed in {where} ({type(module).__name__}): {type(error).__name__}: {error}"
            raise RecordingError(message) from error
        finally:
            snapshot.restore()


def _raised_in(error: BaseException, modules: Mapping[str, nn.Module]) -> tuple[nn.Module, str] | None:
    """Return the innermost module in whose method an error was raised and its description, or ``None``."""
    names = {id(module): name for name, module in modules.items()}
    found = None
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and names.get(id(owner)):
            found = owner, f"module {names[id(owner)]!r}"
        trace = trace.tb_next
    return found
