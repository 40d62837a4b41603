"""The module calls of one run: labels, comparison, observation and recorded outputs."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from lightning_recorder.errors import RecordingError, warn
from lightning_recorder.inputs import way_out
from lightning_recorder.internals.autograd import in_backward, version_of
from lightning_recorder.internals.compiled import EagerStance
from lightning_recorder.internals.hooks import ModuleHook
from lightning_recorder.internals.module_tree import buffers_of, hookable, is_scripted, parameters_of
from lightning_recorder.internals.pause_recording import pause_recording
from lightning_recorder.internals.preserve_state import ModuleState, own_copies, same_gradients, same_random_numbers
from lightning_recorder.module_names import named_submodules
from lightning_recorder.structure import describe_unknown, iter_tensors

__all__ = [
    "Call",
    "CallWatch",
    "Label",
    "OutputRecorder",
    "Postprocessor",
    "SavedOutput",
    "differences",
    "label_calls",
    "last_names",
    "run_without_trace",
]

Label = tuple[int, int]
"""A pair ``(depth, idx)``: the depth of a module's name, 0 for the root, and the position of a call among all calls at
this depth, starting at 1.
"""

Postprocessor = Callable[[Any], Any]
"""A function that takes a module's output and returns a replacement, or ``None`` to leave it unchanged."""

# The maximum number of calls of each kind in a message. If a net takes another branch, hundreds of calls may differ.
_SHOWN = 8


class Call(NamedTuple):
    """One call of a module in a run, identified in the same way in every run."""

    name: str
    """The module's name."""
    number: int
    """The number of the call among all calls of this module in the run, starting at 1; 0 for an uncalled container."""

    def __str__(self) -> str:
        return repr(self.name) if self.number == 1 else f"{self.name!r} (call {self.number})"


def label_calls(calls: Iterable[Call], last_names: Mapping[str, str] = MappingProxyType({})) -> dict[Label, Call]:
    """Label the calls of a run as torchinfo does. The calls are given in the order in which they began.

    A module that is not called itself, such as a ``ModuleList``, gets a label before the first call of its contents. It
    gets another label if modules at its depth or above are called between two calls of its contents. Likewise, a called
    module gets another label before another module calls its contents.

    ``last_names`` maps the first name of each shared module to its last name, which determines the depth and the parent
    modules.

    Example:
        >>> label_calls([Call("", 1), Call("stem", 1), Call("blocks.0", 1), Call("head", 1)])
        {(0, 1): Call(name='', number=1), (1, 1): Call(name='stem', number=1), (1, 2): Call(name='blocks', number=0),
         (2, 1): Call(name='blocks.0', number=1), (1, 3): Call(name='head', number=1)}
    """
    counts: Counter[int] = Counter()
    labels = {}
    first_names = {last: first for first, last in last_names.items()}
    path = [""]  # the labeled modules that enclose the latest call, by depth
    for call in calls:
        last_name = last_names.get(call.name, call.name)
        parts = last_name.split(".") if last_name else []
        around = [".".join(parts[:depth]) for depth in range(len(parts))]
        for depth, name in enumerate((*around, last_name)):
            is_called = depth == len(parts)
            if is_called or path[depth : depth + 1] != [name]:
                counts[depth] += 1
                labels[depth, counts[depth]] = call if is_called else Call(first_names.get(name, name), 0)
                path[depth:] = [name]
    return labels


def last_names(net: nn.Module) -> dict[str, str]:
    """Return a mapping from the first to the last name of each module that has several names.

    Example:
        >>> act = nn.ReLU()
        >>> last_names(nn.Sequential(act, nn.Sequential(nn.Linear(2, 2), act)))
        {'0': '1.1'}
    """
    first: dict[int, str] = {}
    found = {}
    for name, module in named_submodules(net, remove_duplicate=False).items():
        if first.setdefault(id(module), name) != name:
            found[first[id(module)]] = name
    return found


def differences(labels: Mapping[Label, Call], calls: Sequence[Call]) -> str | None:
    """Describe the differences between the calls of a run and the labeled calls. Return ``None`` if they are equal.

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
    kwargs: dict[str, Any] | None
    """The dictionary that torch creates for this call and passes to all its hooks; None for a TorchScript module."""
    handled: BaseException | None
    """The exception that was being handled when the call began."""


class CallWatch:
    """Observe the module calls of this thread while the context is active.

    A call that ``torch.utils.checkpoint`` repeats inside a backward pass is not counted again. Compiled modules run
    eagerly while the context is active, because hooks on compiled code never fire.
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
        """Handle the end of a call that did not raise. Return a replacement output, or ``None`` to keep the output."""
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
            scripts: dict[int, str] = {}
            for name, module in self.modules.items():
                if is_scripted(module):
                    scripts[id(module)] = name
                    continue
                before, after = _CallHook(self, name, self._before), _CallHook(self, name, self._after)
                self._handles.append(hookable(module).register_forward_pre_hook(before, with_kwargs=True))
                self._handles.append(hookable(module).register_forward_hook(after, with_kwargs=True, always_call=True))
            if scripts:
                # TorchScript modules accept no hooks with keyword arguments, so observe their calls by global hooks.
                begin, end = _ScriptHook(self, scripts, self._before), _ScriptHook(self, scripts, self._after)
                self._handles.append(register_module_forward_pre_hook(begin))
                self._handles.append(register_module_forward_hook(end, always_call=True))
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._open.clear()
        self._stance.release()

    @property
    def _watching(self) -> bool:
        return threading.get_ident() == self._thread and in_backward() == self._in_backward

    def _before(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        self._counts[name] = self._counts.get(name, 0) + 1
        call = Call(name, self._counts[name])
        self.calls.append(call)
        self.begin(call, args, kwargs or {})
        self._open.append(_OpenCall(call, kwargs, sys.exc_info()[1]))

    def _after(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None, output: Any) -> Any:
        of_call = (each for each in reversed(self._open) if each.kwargs is kwargs and each.call.name == name)
        found = next(of_call, None)
        # The start of the call was missed because another hook raised first.
        if found is None:
            return None
        while self._open.pop() is not found:
            pass
        # This hook also runs if the forward raised an exception, which the net may catch. In that case, Python handles
        # another exception than at the start of the call.
        if sys.exc_info()[1] is not found.handled:
            return None
        self.ended.append(found.call)
        return self.end(found.call, output)


class _CallHook(ModuleHook):
    """A hook of a :class:`CallWatch` on one module."""

    def __init__(self, watch: CallWatch, name: str, see: Callable[..., Any]) -> None:
        self._watch = watch
        self._name = name
        self._see = see

    def __call__(self, module: nn.Module, *seen: Any) -> Any:
        # After its removal, another thread may still call the hook, then without keyword arguments.
        return self._see(self._name, *seen) if self._watch._watching else None


class _ScriptHook(ModuleHook):
    """A global hook of a :class:`CallWatch`, for the TorchScript modules of the net."""

    def __init__(self, watch: CallWatch, names: Mapping[int, str], see: Callable[..., Any]) -> None:
        self._watch = watch
        self._names = names
        self._see = see

    def __call__(self, module: nn.Module, args: tuple[Any, ...], *output: Any) -> Any:
        name = self._names.get(id(module))
        return self._see(name, args, None, *output) if name is not None and self._watch._watching else None


class SavedOutput:
    """The state of a tensor at the time when a hook received it."""

    def __init__(self, tensor: Tensor, version: int | None, copy: Tensor) -> None:
        self._tensor = tensor
        self._saved_version = version
        self._copy = copy

    @classmethod
    def of(cls, tensor: Tensor) -> SavedOutput:
        """Save the current state of a tensor."""
        # Enable autograd in any mode, so that the copy requires a gradient exactly if the tensor does.
        with pause_recording(), torch.enable_grad():
            return cls(tensor, version_of(tensor), tensor.clone())

    @property
    def value(self) -> Tensor:
        """The tensor itself if it has not been modified since it was saved, otherwise the copy."""
        unchanged = self._saved_version is not None and version_of(self._tensor) == self._saved_version
        return self._tensor if unchanged else self._copy

    def matches(self, tensor: Tensor) -> bool:
        """Return True if this is the same tensor with the same values."""
        return self._tensor is tensor and self._saved_version is not None and version_of(tensor) == self._saved_version


class OutputRecorder(CallWatch):
    """Observe the module calls of one forward pass, and record and postprocess outputs."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        labels: Mapping[Call, Label],
        postprocs: Mapping[Label, Postprocessor],
        keep: bool,
    ) -> None:
        super().__init__(modules)
        self.records: dict[Label, SavedOutput | dict[str, SavedOutput]] = {}
        self._labels = labels
        self._postprocs = postprocs
        self._keep = keep
        self._latest: dict[int, SavedOutput] = {}

    def end(self, call: Call, output: Any) -> Any:
        """Record and postprocess the output of a recorded call."""
        label = self._labels.get(call)
        if label is None:
            return None
        if self._keep:
            if isinstance(output, Tensor):
                self.records[label] = self._saved(output)
            else:
                tensors = iter_tensors(output, unknown=partial(self._warn_of_unknown, call.name))
                self.records[label] = {path: self._saved(tensor) for path, tensor in tensors}
        postproc = self._postprocs.get(label)
        return None if postproc is None else postproc(output)

    def _warn_of_unknown(self, name: str, path: str, value: object, error: Exception | None) -> None:
        warn(f"RecordedNet ignores {describe_unknown(name, path, value, error)}")

    def _saved(self, tensor: Tensor) -> SavedOutput:
        # A parent module often returns the output of its last child. The records of both modules share one copy.
        saved = self._latest.get(id(tensor))
        if saved is None or not saved.matches(tensor):
            saved = self._latest[id(tensor)] = SavedOutput.of(tensor)
        return saved


def run_without_trace(
    net: nn.Module, watch: CallWatch, snapshot: ModuleState, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Run the net once in its current mode, without autograd, and restore everything afterwards, even if it raises.

    Raises:
        RecordingError: If the net raises. The message names the module that raised.
    """
    with pause_recording():
        copies = own_copies({**dict(enumerate(args)), **kwargs})
        args, kwargs = tuple(copies[index] for index in range(len(args))), {key: copies[key] for key in kwargs}
        tensors = (*parameters_of(net), *buffers_of(net), *(tensor for _, tensor in iter_tensors((args, kwargs))))
        try:
            with same_gradients(tensors), same_random_numbers({tensor.device for tensor in tensors}), watch:
                net(*args, **kwargs)
        except Exception as error:
            module, where = _raised_in(error, watch.modules) or (net, "the net itself")
            message = f"the labeling run failed in {where} ({type(module).__name__}): {type(error).__name__}: {error}"
            raise RecordingError(way_out(net, message, args, kwargs, in_eval="call net.eval() before")) from error
        finally:
            snapshot.restore()


def _raised_in(error: BaseException, modules: Mapping[str, nn.Module]) -> tuple[nn.Module, str] | None:
    """Return the innermost module with a method that raised the error, and the module's description; or ``None``."""
    names = {id(module): name for name, module in modules.items()}
    found = None
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and names.get(id(owner)):
            found = owner, f"module {names[id(owner)]!r}"
        trace = trace.tb_next
    return found
