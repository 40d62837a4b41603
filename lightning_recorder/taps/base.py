"""The base class of taps: hooks on selected modules that are attached and removed together."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from lightning_recorder.errors import ArgumentError, RecordingError, check_callable, describe_error, warn
from lightning_recorder.internals.autograd import (
    in_backward,
    in_transform,
    is_tracing,
    is_transformed,
    without_class,
    without_functions,
)
from lightning_recorder.internals.compiled import (
    EagerStance,
    compiled_owner,
    describe_compiled,
    observe_compiled_calls,
    stop_observing,
)
from lightning_recorder.internals.hooks import ModuleHook
from lightning_recorder.internals.module_tree import hookable
from lightning_recorder.internals.pause_recording import is_paused, pause_recording
from lightning_recorder.internals.stopwatch import Stopwatch
from lightning_recorder.names import Site
from lightning_recorder.structure import describe_unknown, iter_tensors

__all__ = ["Receiver", "Site", "Tap"]

_FEW_HANDLES = 256
_PATH = "_lightning_recorder_path"  # the attribute of a receiver's error that holds the path of the tensor
# One lock for all taps, because a tap with its own lock could not be copied. The lock is only held for an append.
_LOCK = threading.Lock()


Receiver = Callable[[Site, Tensor], None]
"""A callback for one detached tensor. It must not keep the tensor, because an in-place operation may change it."""


class Tap(ABC):
    """Base class of hooks on modules that pass each tensor to a receiver while the tap is attached.

    A tap is a context manager. On exit, including after an exception, all its hooks are removed from modules and
    tensors. Attaching again is cheap, so a tap is attached only for recorded steps and has no overhead in other steps.

    Args:
        modules: The modules by name.
        receive: A callback for the site and the tensor, called inside the hook with autograd disabled. The tensor is
            detached but not copied. Read it or clone it, but do not keep it, because the model may overwrite its
            memory. Do not write to it.
        condition: A callback without arguments, called once per module call (for gradients, once per gradient). If it
            returns a false value, nothing is recorded.
        strict: Raise errors from ``receive`` or ``condition``, instead of warning once and ignoring that module from
            then on.

    Raises:
        ArgumentError: If ``modules`` is not a mapping from names to modules, or a callback is not callable.
        RecordingError: If ``strict`` is true and ``receive`` or ``condition`` raises. It is raised from the forward or
            backward pass of the model and names the module.

    Note:
        Values, gradients, random numbers and the autograd graph of the model do not change. The tap keeps no tensor of
        a step alive. Several models may be trained in separate threads. Compiled modules and functions run eagerly
        while a tap is attached, since hooks on compiled code never run.
    """

    _during_backward: ClassVar[bool] = False
    """True to record the module calls that checkpointing repeats inside the backward pass."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        receive: Receiver,
        *,
        condition: Callable[[], object] | None = None,
        strict: bool = False,
    ) -> None:
        self.modules = _checked(modules)
        check_callable("receive", receive, "site, tensor")
        if condition is not None:
            check_callable("condition", condition, "")
        self.strict = strict
        self._receive = receive
        self._condition = condition
        self._attached = False
        self._hooked = False
        self._stance = EagerStance()
        self._handles: list[RemovableHandle] = []
        self._hooks_on_modules: list[RemovableHandle] = []  # used if compiled code stays compiled
        self._thread = 0
        self.compiled_calls: set[str] = set()
        """The names of compiled functions that were called while the hooks were attached and ``eager`` was false."""
        self.traced: Collection[nn.Module] = ()
        """Modules that are recorded inside compiled code. Their calls are not in ``compiled_calls``."""
        self.eager = True
        """Run compiled code eagerly while the hooks are attached."""
        self.stopwatch: Stopwatch | None = None
        """The stopwatch that measures the time inside the hooks, or None."""
        self.fast_path: Callable[[Site, Tensor], bool] | None = None
        """A fast path that is tried before ``receive``, with a plain tensor that is not detached. It either processes
        the tensor without any torch operation and returns True, or returns False to fall back to ``receive``."""
        self.called: set[str] = set()
        """The names of the modules whose hooks were called. A user of the tap may clear this set."""
        self.per_call = False
        """Keep the calls of a module apart: the paths of its n-th call since :meth:`attach` end with ``#n``. A gradient
        has the number of the forward call."""
        self._calls: dict[str, int] = {}  # the number of the last call of each module
        self._open: dict[tuple[int, str], list[int]] = {}  # the calls in progress by thread and module, innermost last
        self._ignored: set[str] = set()
        self._unknown: set[type] = set()
        self._prune_at = _FEW_HANDLES

    @abstractmethod
    def _register(self, name: str, module: nn.Module) -> None:
        """Register the hooks of one module and pass each handle to :meth:`_keep`."""

    @property
    def attached(self) -> bool:
        """True while the tap records."""
        return self._attached

    @property
    def ran_eagerly(self) -> tuple[str, ...]:
        """The names of compiled functions that ran eagerly while the hooks were attached."""
        return self._stance.ran

    @property
    def failed(self) -> frozenset[str]:
        """The names of the modules that are ignored because recording them failed."""
        return frozenset(self._ignored)

    def revive(self) -> None:
        """Resume recording of the modules that are ignored after a failure."""
        self._ignored.clear()

    def attach(self) -> None:
        """Attach the hooks. A no-op if they are already attached."""
        if self._attached:
            return
        self._attached = True
        self.restart_calls()
        if self._hooked:
            return
        self._hooked = True
        try:
            if self.eager:
                self._stance.hold()
            else:
                self._thread = threading.get_ident()
                observe_compiled_calls(self._enter_compiled)
            self._register_all()
        except BaseException:
            self.remove()
            raise

    def _register_all(self) -> None:
        # Some modules, such as TorchScript modules, do not support hooks.
        for name, module in self.modules.items():
            if self.per_call:
                self._guarded(name, None, self._register_begin, module)
            self._guarded(name, None, self._register, module)
            if self.per_call:
                self._guarded(name, None, self._register_end, module)
        if not self.eager:
            with _LOCK:
                self._hooks_on_modules, self._handles = self._handles, []

    def _register_begin(self, name: str, module: nn.Module) -> None:
        self._keep(hookable(module).register_forward_pre_hook(_CallHook(self, name, ends=False)))

    def _register_end(self, name: str, module: nn.Module) -> None:
        # Also called if the module raises.
        self._keep(hookable(module).register_forward_hook(_CallHook(self, name, ends=True), always_call=True))

    def _enter_compiled(self, function: Callable[..., Any], /) -> Callable[[Any, Any, Any], object] | None:
        """Remove the hooks during a call of compiled code, because hooks would cause a recompilation."""
        if self._thread != threading.get_ident() or not self._hooks_on_modules:
            return None
        if compiled_owner(function) not in self.traced:
            self.compiled_calls.add(describe_compiled(function))
        hooks, self._hooks_on_modules = self._hooks_on_modules, []
        others, self._handles = self._handles, []
        for hook in hooks:
            hook.remove()

        def leave(args: Any, kwargs: Any, result: Any) -> None:
            if self._hooked:
                self._register_all()
                self._handles += others

        return leave

    def pause(self) -> None:
        """Stop recording until the next :meth:`attach`, but leave the hooks registered.

        Between recorded steps, calling hooks without effect has less overhead than registering them again.
        """
        self._attached = False

    def remove(self) -> None:
        """Remove all hooks from modules and tensors. A no-op if the tap is not attached."""
        self._attached = self._hooked = False
        with _LOCK:
            handles, self._handles = self._handles + self._hooks_on_modules, []
            self._hooks_on_modules = []
        for handle in handles:
            handle.remove()
        if self.eager:
            self._stance.release()
        else:
            stop_observing(self._enter_compiled)

    def __enter__(self) -> Self:
        self.attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __getstate__(self) -> dict[str, Any]:
        # A copy refers to copies of the modules and is not attached. The hooks on those copies do nothing.
        return {**self.__dict__, "_attached": False, "_hooked": False, "_handles": [], "_hooks_on_modules": []}

    def _keep(self, handle: RemovableHandle) -> None:
        """Keep the handle of a hook. Occasionally drop handles whose tensors are gone, to bound the list."""
        with _LOCK:
            self._handles.append(handle)
            if len(self._handles) > self._prune_at:
                self._handles = [each for each in self._handles if each.hooks_dict_ref() is not None]
                self._prune_at = max(_FEW_HANDLES, 2 * len(self._handles))
        if not self._attached:  # another thread removed the tap while this thread was inside a hook
            handle.remove()

    def _guarded(self, name: str, site: Site | None, function: Callable[..., None], *args: Any) -> None:
        """Call a function from a hook, if the hook may record, and keep errors of the function from the model.

        Calling the function is most of the overhead of a hook. Therefore, if the last argument is a plain tensor, the
        fast path is tried first. ``site`` is the site of this tensor, or ``None`` for no fast path.
        """
        if not self._attached or name in self._ignored or in_transform() or is_paused():
            return
        watch = self.stopwatch
        if site is not None and self.fast_path is not None and watch is None and self._condition is None:
            try:
                if type(args[-1]) is Tensor:
                    # Disable function modes: otherwise, reading each property of the tensor would call the active mode.
                    with without_functions():
                        if self.fast_path(site, args[-1]):
                            return
            except Exception:  # noqa: BLE001 - the function below raises the same error, which is then reported
                pass
        started = None if watch is None else watch.start()
        try:
            with pause_recording():
                function(name, *args)
        except Exception as error:
            path = getattr(error, _PATH, None)
            at = "" if path is None else f" at {path!r}"
            message = f"{type(self).__name__} could not record module {name!r}{at}: {describe_error(error)}"
            if self.strict:
                raise RecordingError(message) from error
            self._ignored.add(name)
            warn(f"{message}. It is no longer recorded; strict=True raises instead.")
        finally:
            if watch is not None and started is not None:
                watch.stop(started)

    def restart_calls(self) -> None:
        """Give the next call of each module the number 1."""
        self._calls.clear()
        self._open.clear()

    def _count_call(self, name: str) -> None:
        """Count a call of a module whose tensors will be recorded."""
        self._calls[name] = self._calls.get(name, 0) + 1

    def _begin_call(self, name: str) -> None:
        """Count a call, which is in progress until :meth:`_end_call`."""
        self._count_call(name)
        self._open.setdefault((threading.get_ident(), name), []).append(self._calls[name])

    def _end_call(self, name: str) -> None:
        """End the innermost call of a module."""
        calls = self._open.get((threading.get_ident(), name))
        if calls:
            calls.pop()

    def _suffix(self, name: str) -> str:
        """Return the suffix of paths in the current call of a module, such as ``#2``; empty in the first call."""
        if not self.per_call:
            return ""
        calls = self._open.get((threading.get_ident(), name))
        number = calls[-1] if calls else self._calls.get(name, 1)
        return "" if number == 1 else f"#{number}"

    def _pass_on(self, name: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        if self._condition is not None and not self._condition():
            return
        for path, tensor in tensors:
            # The values of a tensor inside a functorch transform cannot be read.
            if not is_transformed(tensor):
                try:
                    self._receive(Site(name, path), without_class(tensor).detach())
                except Exception as error:
                    with suppress(AttributeError):  # some errors do not allow new attributes
                        setattr(error, _PATH, path)
                    raise

    def _tensors(self, name: str, value: Any, path: str) -> Iterable[tuple[str, Tensor]]:
        """Return the tensors in the arguments or the output of the current call of the named module."""
        if isinstance(value, Tensor):  # the common case, without a traversal
            return ((path + self._suffix(name), value),)
        found = iter_tensors(value, path, unknown=partial(self._warn_of_unknown, name))
        suffix = self._suffix(name)
        return ((f"{inner}{suffix}", tensor) for inner, tensor in found) if suffix else found

    def _inputs(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors in the arguments of the named module."""
        yield from self._tensors(name, args, "in")
        yield from self._tensors(name, kwargs, "in")

    def _warn_of_unknown(self, name: str, path: str, found: object, error: Exception | None) -> None:
        if type(found) not in self._unknown:
            self._unknown.add(type(found))
            warn(f"{type(self).__name__} ignores {describe_unknown(name, path, found, error)}")


def _checked(modules: object) -> dict[str, nn.Module]:
    """Return the modules as a dictionary, or raise if they are not a mapping from names to modules."""
    if isinstance(modules, Mapping) and all(isinstance(module, nn.Module) for module in modules.values()):
        return dict(modules)
    raise ArgumentError(
        "modules takes a mapping from names to modules, such as the result of Selection(...).resolve(model); "
        f"got {modules!r:.80}"
    )


class TapHook(ModuleHook):
    """A hook on a module that calls a method of its tap with the name of the module and the arguments of the hook."""

    def __init__(self, tap: Tap, name: str, method: Callable[..., None], site: Site | None = None) -> None:
        self._tap = tap
        self._name = name
        self._method = method
        self._site = site

    def __call__(self, module: nn.Module, *passed: Any) -> None:
        # Do nothing while torch.compile traces the hook. The hook records compiled code only in steps that run eagerly.
        tap = self._tap
        if torch.compiler.is_compiling() or is_tracing() or not tap._attached:
            return
        tap.called.add(self._name)
        if tap._during_backward or not in_backward():
            site = self._site
            if tap.per_call:
                suffix = tap._suffix(self._name)
                if site is not None and suffix:
                    site = Site(site.name, site.path + suffix)
            tap._guarded(self._name, site, self._method, module, *passed)


class _CallHook(ModuleHook):
    """A hook that notifies its tap of the begin or end of a module call, so that each call has a number.

    A call is counted when it begins, because it may raise or call the same module again.
    """

    def __init__(self, tap: Tap, name: str, *, ends: bool) -> None:
        self._tap = tap
        self._name = name
        self._ends = ends

    def __call__(self, module: nn.Module, *passed: Any) -> None:
        tap = self._tap
        if torch.compiler.is_compiling() or is_tracing() or not tap._attached:
            return
        if tap._during_backward or not in_backward():
            (tap._end_call if self._ends else tap._begin_call)(self._name)
