"""The operators that record inside compiled code, and the switch between recording and non-recording graphs.

A hook that torch.compile traces calls ``torch.ops.lightning_recorder.receive``, ``probe`` or ``watch``, which become
opaque operators of the graph. One of their arguments is a token: a number that identifies the receiver of the tensor at
run time. The token is an input of the graph and not a constant, so that equal blocks of a model share one graph.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from types import CodeType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_recorder.internals.autograd import is_compiled, is_view
from lightning_recorder.internals.module_tree import ModuleSet, modules_of, named_modules_of, stored_attribute

__all__ = [
    "TraceReceiver",
    "compile_time_s",
    "new_token",
    "operators",
    "skip_frames_of",
    "switch",
    "why_not_traceable",
]

_TESTED = (2, 13)
"""The lowest version of torch with which recording inside compiled code was tested."""


class TraceReceiver(Protocol):
    """The receiver of tensors with a token."""

    def receive(self, path: str, tensor: Tensor, /) -> None:
        """Process a tensor at a path. The tensor must not be kept."""

    def watch(self, path: str, tensor: Tensor, /) -> None:
        """Register a hook on a tensor that passes its gradient to :meth:`receive`."""


_receivers: weakref.WeakValueDictionary[int, TraceReceiver] = weakref.WeakValueDictionary()
_numbers = count()

ACTIVE = ""
"""The keys of the recordings that are switched on, such as ``"|activations|gradients|"``.

Compiled code has a guard on this string, so there is one graph for each combination that occurs. It is not a number,
because torch.compile would turn a changing number into an input of the graph.
"""

_holders: Counter[str] = Counter()


def switch(key: str, *, on: bool) -> None:
    """Switch a recording on or off. If several holders switch a key on, it stays on until all have switched it off."""
    global ACTIVE  # noqa: PLW0603 - a guard on a global is one guard for all hooks of a graph
    _holders[key] += 1 if on else -1
    ACTIVE = "".join(f"|{each}|" for each in sorted(+_holders))


def new_token(receiver: TraceReceiver) -> Tensor:
    """Return a token for a receiver, ``[1]`` int64 on the CPU. The token does not keep the receiver alive."""
    number = next(_numbers)
    _receivers[number] = receiver
    with torch.inference_mode(False):
        return torch.tensor([number], device="cpu")


def _receive(token: Tensor, value: Tensor, path: str) -> None:
    receiver = _receivers.get(int(token.item()))
    if receiver is not None:
        receiver.receive(path, value)


def _ignore(token: Tensor, value: Tensor, path: str) -> None:
    """The meta implementation of the operators that return nothing."""


class _Probe(torch.autograd.Function):
    """The identity, whose backward pass records the gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, token: Tensor, path: str) -> Tensor:
        ctx.token, ctx.path = token, path
        # Return the result of ``detach``, because autograd would forbid in-place operations on a view.
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        torch.ops.lightning_recorder.receive(ctx.token, grad, ctx.path)
        return grad, None, None


def _probe(value: Tensor, token: Tensor, path: str, given: list[Tensor]) -> Tensor:
    # If the caller also uses the original tensor, the identity function ``_Probe`` changes the order in which autograd
    # sums the gradient. A hook does not change the order, but is lost when a view is changed in place.
    if value.grad_fn is None or not is_view(value) or any(each is value for each in given):
        _watch(token, value, path)
        return value
    _allow_changes(token)
    result: Tensor = _Probe.apply(value, token, path)  # type: ignore[no-untyped-call]  # torch has no annotation
    return result


def _watch(token: Tensor, value: Tensor, path: str) -> None:
    if not isinstance(value, _symbolic()):
        _watch_now(token, value, path)
    elif value.grad_fn is None or not value.grad_fn.next_functions:
        # The tensor is an input of the graph, so the graph computes only part of the tensor's gradient. Register the
        # hook at run time, when autograd computes the whole gradient.
        torch.ops.lightning_recorder.watch_now(token, value, path)
    else:
        _allow_changes(token)
        value.register_hook(partial(_pass_on, token, path))


def _watch_now(token: Tensor, value: Tensor, path: str) -> None:
    receiver = _receivers.get(int(token.item()))
    if receiver is not None and value.requires_grad:
        receiver.watch(path, value)


def _symbolic() -> tuple[type[Tensor], ...]:
    """Return the tensor classes with which torch.compile traces the backward pass."""
    from torch._subclasses import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return FakeTensor, FunctionalTensor


def _pass_on(token: Tensor, path: str, grad: Tensor) -> None:
    torch.ops.lightning_recorder.receive(token, grad, path)


def _allow_changes(token: Tensor) -> None:
    """Exclude a token from the check that tensors saved for the backward pass have not changed.

    The operators are declared to change their token, but do not. Without this exclusion, a graph that is called twice
    before the backward pass, such as the graph of a shared block, would raise with the backend ``aot_eager``.
    """
    with suppress(Exception):  # private functions of torch, which fail if the caller is not tracing
        from torch.fx.experimental.proxy_tensor import _get_proxies

        for proxy in _get_proxies(token):
            proxy.node.meta["saved_tensor_with_no_vc_check"] = True


class _Defined:
    """The library of the operators, after they have been defined."""

    library: torch.library.Library | None = None
    has_failed = False


def operators() -> bool:
    """Define the operators if necessary. Return False if this version of torch does not support them.

    Imports ``torch._dynamo``, so call this only if something is compiled.
    """
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if _Defined.library is None and not _Defined.has_failed and version >= _TESTED:
        _Defined.has_failed = True
        with suppress(Exception):  # if another version of torch differs, the eager stance is used instead
            _Defined.library = _define()
            _Defined.has_failed = False
    return _Defined.library is not None


def _define() -> torch.library.Library:
    library = torch.library.Library("lightning_recorder", "DEF")
    # The schemas declare an argument as mutated, so that the operators are neither removed as unused nor reordered.
    library.define("receive(Tensor(a!) token, Tensor value, str path) -> ()")
    library.define("probe(Tensor(a) value, Tensor(b!) token, str path, Tensor[] given) -> Tensor(a)")
    library.define("watch(Tensor(a!) token, Tensor value, str path) -> ()")
    library.define("watch_now(Tensor(a!) token, Tensor value, str path) -> ()")
    disable: Any = torch._dynamo.disable
    for name, function in (("receive", _receive), ("watch_now", _watch_now)):
        library.impl(name, disable(function), "CompositeExplicitAutograd")
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        library.impl(name, _ignore, "Meta")
        torch.library.register_fake(f"lightning_recorder::{name}", _ignore, lib=library)
    library.impl("probe", disable(_probe), "Autograd")
    library.impl("probe", lambda value, token, path, given: value.detach(), "CompositeExplicitAutograd")
    library.impl("watch", disable(_watch), "Autograd")
    library.impl("watch", _ignore, "CompositeExplicitAutograd")
    return library


def skip_frames_of(function: Callable[..., Any]) -> None:
    """Prevent torch.compile from compiling a function as a separate graph. It is still traced inside other graphs."""
    from torch._dynamo import eval_frame

    code: CodeType = function.__code__
    skip: Any = getattr(eval_frame, "skip_code", None)
    if skip is not None:
        skip(code)


def compile_time_s() -> float:
    """Return the total compile time of torch.compile in this process, in seconds; 0 if torch does not expose it."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    spent: Any = getattr(utils, "cumulative_time_spent_ns", {})
    return sum(float(spent.get(name, 0)) for name in ("entire_frame_compile", "entire_backward_compile")) / 1e9


def why_not_traceable(root: nn.Module, modules: Iterable[nn.Module]) -> str:
    """Return the reason why modules cannot be recorded inside compiled code, and the remedy; empty if they can be."""
    if not operators():
        return f"torch {torch.__version__} is older than {'.'.join(map(str, _TESTED))}"
    is_whole = stored_attribute(root, "_compiler_ctx") is not None  # set by Lightning on a compiled LightningModule
    compiled = {name: each for name, each in named_modules_of(root) if is_compiled(each)}
    for name, each in compiled.items():
        # If forward is defined in torch, torch compiles the calls inside the module one by one, and only calls of
        # modules with hooks. Check where forward is defined, not the class, which FSDP derives from the user's class.
        if stored_attribute(each, "_orig_mod") is None and type(each).forward.__module__.startswith("torch."):
            kind = type(each).__name__
            return f"{name!r} is a {kind} on which .compile() was called; use torch.compile(module) for it"
    wanted = ModuleSet(modules)
    for top in [root] if is_whole else compiled.values():
        for module in modules_of(top):
            if _was_compiled(module, wanted):
                return (
                    f"{type(module).__name__} was compiled before the hooks were registered, or by a run without this "
                    "recorder; call torch._dynamo.reset() before the run"
                )
    return ""


def _was_compiled(module: nn.Module, wanted: ModuleSet) -> bool:
    """Return True if a method of a module has compiled code that calls wanted modules without their hooks."""
    # Hooks on the compiled module itself are called outside of the compiled code.
    if not any(each in wanted for each in modules_of(module) if each is not module):
        return False
    entries: Any = torch._dynamo.eval_frame._debug_get_cache_entry_list
    return any("ACTIVE" not in str(entry.guard_manager) for code in _codes(module) for entry in entries(code))


def _codes(module: nn.Module) -> Iterator[CodeType]:
    """Yield the code objects of the module's methods that torch.compile may have compiled."""
    inner = stored_attribute(module, "_orig_mod")
    if inner is not None and type(inner).__module__.startswith("torch."):
        wrapper: Any = sys.modules["torch._dynamo.external_utils"]
        yield from (each for each in wrapper.wrap_inline.__code__.co_consts if inspect.iscode(each))
    for kind in type(module).__mro__:
        if kind.__module__.partition(".")[0] not in ("torch", "lightning", "pytorch_lightning"):
            methods = (inspect.unwrap(each) for each in vars(kind).values() if inspect.isroutine(each))
            yield from (each.__code__ for each in methods if inspect.isfunction(each))
