"""Detection of compiled modules, observation of compiled calls, and eager execution in recorded steps."""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, Protocol

import torch
from torch import nn

from lightning_recorder.internals.autograd import MODULE_CALLS, is_compiled
from lightning_recorder.internals.module_tree import (
    ModuleSet,
    bases_of,
    class_attribute,
    modules_of,
    named_modules_of,
    package_of,
    stored_attribute,
)

__all__ = [
    "CompiledCallObserver",
    "EagerStance",
    "compiled_modules",
    "compiled_owner",
    "describe_compiled",
    "flex_attention_users",
    "observe_compiled_calls",
    "stop_observing",
]


class CompiledCallObserver(Protocol):
    """Callback for calls of compiled code."""

    def __call__(self, function: Callable[..., Any], /) -> Callable[[Any, Any, Any], object] | None:
        """Handle the start of a call.

        Returns:
            ``None``, or a function that is called with the arguments, the keyword arguments and the result when the
            call ends. The result is ``None`` if the call raised, or if torch does not expose it.
        """


class _Observed:
    """The observers of the process, and the torch function that is replaced while there are observers."""

    lock = threading.RLock()
    observers: tuple[weakref.ref[CompiledCallObserver], ...] = ()
    original: Callable[[Any], Any] | None = None


def observe_compiled_calls(observer: CompiledCallObserver, *, first: bool = False) -> bool:
    """Call a function at each call of compiled code in the process, until :func:`stop_observing`.

    Calls of code that is compiled later, or during the call, are included. Without an observer, calls of compiled code
    run no code of this package.

    With ``first``, the observer is called before all others instead of after them.

    Returns:
        False if nothing is observed, because this version of torch has no suitable entry point.
    """
    eval_frame: Any = sys.modules.get("torch._dynamo.eval_frame")
    with _Observed.lock:
        if not hasattr(eval_frame, "_callback_from_stance"):
            return False
        # torch calls this function at each call of compiled code, to decide how to run its frames. The contexts of the
        # call have been entered before.
        if eval_frame._callback_from_stance is not _callback_from_stance:
            _Observed.original = staticmethod(eval_frame._callback_from_stance)
            eval_frame._callback_from_stance = _callback_from_stance
        # A weak reference, so that an abandoned recording is not kept alive.
        kind: Any = weakref.WeakMethod if inspect.ismethod(observer) else weakref.ref
        reference = kind(observer, _remove_dead)
        others = _Observed.observers
        _Observed.observers = (reference, *others) if first else (*others, reference)
    return True


def _remove_dead(reference: object, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
    if not is_finalizing():  # a default argument, because at shutdown module globals may be None
        stop_observing(None)


def stop_observing(observer: CompiledCallObserver | None) -> None:
    """Undo :func:`observe_compiled_calls`; a no-op for a function that is not registered."""
    eval_frame: Any = sys.modules.get("torch._dynamo.eval_frame")
    with _Observed.lock:
        _Observed.observers = tuple(each for each in _Observed.observers if each() not in (None, observer))
        if not _Observed.observers and getattr(eval_frame, "_callback_from_stance", None) is _callback_from_stance:
            eval_frame._callback_from_stance = _Observed.original


def _callback_from_stance(callback: Any) -> Any:
    # ``callback`` is ``None`` for functions excluded from compilation.
    if callback is not None and _Observed.observers:
        with suppress(Exception):  # the call is not observed if torch's frame has other variable names
            _notify(sys._getframe(1))
    return None if _Observed.original is None else _Observed.original(callback)


def _notify(frame: FrameType) -> None:
    """Notify the observers of a call, given the frame of torch's wrapper around the compiled function."""
    names = frame.f_locals
    function, cleanups = names.get("fn"), names.get("cleanups")
    if not callable(function) or not isinstance(cleanups, list) or _is_private_of_torch(function):
        return
    for reference in _Observed.observers:
        observer = reference()
        end = None if observer is None else observer(function)
        if end is not None:
            # torch calls the functions in this list when the call ends, even if the call raises.
            cleanups.append(partial(_end_call, end))


def _end_call(end: Callable[[Any, Any, Any], object]) -> None:
    names = sys._getframe(1).f_locals  # torch's wrapper; a reference to the frame would be a cycle
    end(names.get("args"), names.get("kwargs"), names.get("result"))


def _is_private_of_torch(function: Any) -> bool:
    """Return True for a local function that torch itself compiles, as in an eager ``flex_attention``."""
    name = getattr(function, "__qualname__", "")
    return "<locals>._" in name and str(getattr(function, "__module__", "")).startswith("torch.")


def compiled_owner(function: Callable[..., Any]) -> object | None:
    """Return the object whose method was compiled, such as the module of ``torch.compile(module)``, or ``None``."""
    if getattr(function, "__qualname__", "") == "wrap_inline.<locals>.inner":  # torch's wrapper of its own modules
        function = getattr(function, "__wrapped__", function)
    return function if isinstance(function, nn.Module) else getattr(function, "__self__", None)


def describe_compiled(function: Callable[..., Any]) -> str:
    """Return a name for a compiled function, such as ``Encoder.forward`` or ``my_loss (train.py:12)``."""
    owner = compiled_owner(function)
    name = getattr(function, "__qualname__", type(function).__name__).rpartition("<locals>.")[2]
    method = name.rpartition(".")[2]
    if isinstance(owner, nn.Module):
        return f"{type(owner).__name__}.{'forward' if method in MODULE_CALLS or owner is function else method}"
    if owner is not None and not inspect.ismodule(owner):
        return f"{type(owner).__name__}.{method}"
    code = getattr(inspect.unwrap(function), "__code__", None)
    if "." in name or code is None:
        return name
    return f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})"


def compiled_modules(root: nn.Module) -> ModuleSet:
    """Return the modules whose calls run compiled code, including all their submodules.

    Modules are compiled by ``torch.compile(module)``, by ``module.compile()``, or as part of a compiled
    LightningModule. Compiled functions are not included; :func:`observe_compiled_calls` observes their calls.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Sequential(nn.ReLU()), backend="eager"))
        >>> sorted(type(each).__name__ for each in compiled_modules(net))
        ['OptimizedModule', 'ReLU', 'Sequential']
    """
    if "torch._dynamo" not in sys.modules:
        return ModuleSet()
    if stored_attribute(root, "_compiler_ctx") is not None:  # set by Lightning on a compiled LightningModule
        return ModuleSet(modules_of(root))
    found = ModuleSet()
    for module in modules_of(root):
        if is_compiled(module):
            found.update(modules_of(module))
    return found


def flex_attention_users(root: nn.Module) -> list[str]:
    """Return the names of the modules that use ``flex_attention``, which needs much more memory without compilation.

    These modules mention the name in the code of ``forward``, or in the configuration of a transformers model.
    """
    return [name for name, module in named_modules_of(root) if _uses_flex_attention(module)]


def _uses_flex_attention(module: nn.Module) -> bool:
    forward = class_attribute(type(module), "forward")
    if isinstance(forward, FunctionType) and "flex_attention" in forward.__code__.co_names:
        return True
    config: Any = stored_attribute(module, "config")
    is_of_transformers = any(package_of(each) == "transformers" for each in bases_of(type(config)))
    return is_of_transformers and getattr(config, "_attn_implementation", None) == "flex_attention"


class _Stance:
    """The stance of torch.compile, which is global to the process, and the number of holds on it."""

    # Reentrant, since the garbage collector may release an abandoned hold while this thread acquires or releases
    # another hold.
    lock = threading.RLock()
    holders = 0
    stance: AbstractContextManager[object] | None = None
    calls = 0
    """The number of calls of compiled code that have run eagerly so far."""
    ran: dict[str, int]
    """The number of the latest eager call of each compiled function, by name."""


_Stance.ran = {}


def _note(function: Callable[..., object], /) -> None:
    with _Stance.lock:
        _Stance.calls += 1
        _Stance.ran[describe_compiled(function)] = _Stance.calls


class EagerStance:
    """A hold on ``torch.compiler.set_stance("force_eager")``.

    The first hold sets the stance. Releasing the last hold restores the previous stance.

    Hooks that are registered on a compiled module after its first call silently never fire. Under the stance they do
    fire, and the compiled code is reused afterwards without recompilation. Holds are counted, because several recorders
    may hold the stance during the same step and release it in the order in which they acquired it. Without the count,
    a release in that order would leave the process in eager mode.

    Note:
        The stance is global to the process. If ``torch._dynamo`` was never imported, nothing is compiled and holding
        the stance is a no-op.
    """

    def __init__(self) -> None:
        self._held = False
        self._since = 0
        self._ran: dict[str, None] = {}

    @property
    def ran(self) -> tuple[str, ...]:
        """Names of the compiled code that ran eagerly while this object held the stance, in any thread of the process.

        Empty if the user's own stance runs everything eagerly.
        """
        self._collect()
        return tuple(self._ran)

    def _collect(self) -> None:
        if self._held and _Stance.calls > self._since:
            with _Stance.lock:
                since, self._since = self._since, _Stance.calls
                self._ran.update(dict.fromkeys(name for name, call in _Stance.ran.items() if call > since))

    def __reduce__(self) -> tuple[type[EagerStance], tuple[()]]:
        return EagerStance, ()  # a copy does not hold the stance

    def __del__(self) -> None:
        # During interpreter shutdown torch is unusable and nothing will be compiled.
        if not sys.is_finalizing():
            self.release()

    def hold(self) -> None:
        """Run compiled code eagerly until :meth:`release`. Idempotent."""
        if self._held or "torch._dynamo" not in sys.modules:
            return
        with _Stance.lock:
            if _Stance.holders == 0:
                stance = _Stance.stance = torch.compiler.set_stance("force_eager")
                # If the user has set the same stance, this hold changes nothing.
                if getattr(getattr(stance, "prev", None), "stance", "") != "force_eager":
                    observe_compiled_calls(_note)
            _Stance.holders += 1
            self._since = _Stance.calls
            self._held = True

    def release(self) -> None:
        """Release the stance; a no-op without a hold."""
        if not self._held:
            return
        with _Stance.lock:
            self._collect()
            self._held = False
            _Stance.holders -= 1
            if _Stance.holders == 0 and _Stance.stance is not None:
                stop_observing(_note)
                _Stance.ran.clear()
                stance, _Stance.stance = _Stance.stance, None
                stance.__exit__(None, None, None)
