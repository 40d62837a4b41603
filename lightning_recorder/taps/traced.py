"""A tap whose hooks torch.compile traces, so that tensors are recorded inside compiled code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_recorder.internals import compiled_operators
from lightning_recorder.internals.autograd import in_backward, is_tracing
from lightning_recorder.internals.compiled_operators import new_token, operators, skip_frames_of, switch
from lightning_recorder.internals.hooks import ModuleHook
from lightning_recorder.internals.module_tree import hookable
from lightning_recorder.taps.base import Receiver, Site, Tap
from lightning_recorder.taps.forward import InputTap
from lightning_recorder.taps.gradient import GradientTap

__all__ = ["TracedTap"]

_Visit = Callable[[Tensor, str, list[Tensor] | None], Tensor]


class TracedTap(Tap):
    """Records the tensors of modules whose calls are compiled, in the compiled code.

    :meth:`install` registers the hooks. torch.compile traces them when it compiles the modules. While the tap is
    attached, calls run a second graph, which records. Otherwise, they run the same graph as without the tap.

    Values, gradients and random numbers do not change. Tensors in tuples, named tuples, lists, dictionaries with
    string keys, subclasses of these classes, and dataclasses are recorded. Tensors in other containers are not.

    Args:
        modules: The modules by name.
        receive: The receiver, as for :class:`~lightning_recorder.taps.Tap`.
        like: The class of the tap that records the same tensors outside of compiled code: ``InputTap``, ``OutputTap``
            or ``OutputGradientTap``.
        key: A key of the recording. Taps with equal keys are switched together, which reduces the number of graphs.
            Taps that record different modules need different keys, because compiled code may outlive the tap.
        others: Other modules whose calls are compiled and that are not recorded. Modules of the same class may share
            compiled code. Hooks on the other modules prevent this while the tap is attached.
        condition: The condition, as for :class:`~lightning_recorder.taps.Tap`. It is evaluated at run time.
        strict: The error handling, as for :class:`~lightning_recorder.taps.Tap`.

    Note:
        With :attr:`per_call`, the calls of a module are numbered in the order in which its tensors arrive. In a
        backward pass, this order differs, so the calls of gradients cannot be kept apart.

        Gradients of inputs are not supported, since recording them changes the order in which autograd sums the
        gradients of a tensor with several uses. The gradient of a returned view only includes its uses after the module
        has returned. If the module itself also uses the view, this part of the gradient is missing.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        receive: Receiver,
        *,
        like: type[Tap],
        key: str,
        others: Iterable[nn.Module] = (),
        condition: Callable[[], object] | None = None,
        strict: bool = False,
    ) -> None:
        super().__init__(modules, receive, condition=condition, strict=strict)
        self.key = key
        self._like = like
        recorded, kinds = set(self.modules.values()), {type(each) for each in self.modules.values()}
        self._others = [each for each in others if type(each) in kinds and each not in recorded]
        self._hooks: list[_TracedHook] = []  # the registry of the operators does not keep them alive
        self._visit_eagerly: Any = _visited
        self._leaf_handles: list[RemovableHandle] = []

    def install(self) -> bool:
        """Register the hooks; return False if this version of torch cannot trace them. Idempotent."""
        if not self._hooked and operators():
            self._hooked = True
            for kind in (_OutputHook, _InputHook):
                # Do not compile the hooks on a compiled module itself, which are called outside of its graph.
                skip_frames_of(kind.__call__)
            self._visit_eagerly = torch.compiler.disable(_visited)
            for name, module in self.modules.items():
                self._register(name, module)
            recorded = len(self._hooks)
            for module in self._others:
                self._register("", module)
            for hook in self._hooks[recorded:]:
                hook.is_recorded = False
        return self._hooked

    @override
    def _register(self, name: str, module: nn.Module) -> None:
        is_gradient = issubclass(self._like, GradientTap)
        if issubclass(self._like, InputTap):
            before = _InputHook(self, name, is_gradient=is_gradient)
            self._handles.append(hookable(module).register_forward_pre_hook(before, with_kwargs=True))
            self._hooks.append(before)
        else:
            after = _OutputHook(self, name, is_gradient=is_gradient)
            self._handles.append(hookable(module).register_forward_hook(after, with_kwargs=True))
            self._hooks.append(after)

    @override
    def attach(self) -> None:
        if not self._attached and self.install():
            self._attached = True
            self.restart_calls()
            self._release_leaves()
            for hook in self._hooks:
                hook.seen.clear()
            if issubclass(self._like, GradientTap):
                self.called.update(self.modules)  # a graph does not report calls without a gradient
            switch(self.key, on=True)

    @override
    def pause(self) -> None:
        if self._attached:
            self._attached = False
            switch(self.key, on=False)
            self._release_leaves()

    def watch(self, tensor: Tensor, receive: Callable[[Tensor], None]) -> None:
        """Pass the gradient of a tensor to a function in the backward pass."""
        handle = tensor.register_hook(receive)
        if tensor.is_leaf:  # the tensor outlives the step
            self._leaf_handles.append(handle)

    def _release_leaves(self) -> None:
        handles, self._leaf_handles = self._leaf_handles, []
        for handle in handles:
            handle.remove()

    @override
    def remove(self) -> None:
        """Stop recording. The hooks stay registered until :meth:`uninstall`, because removing them would recompile."""
        self.pause()

    def uninstall(self) -> None:
        """Remove the hooks from the modules. Idempotent."""
        self.pause()
        self._hooked = False
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        self._hooks.clear()

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_hooks": [], "_leaf_handles": [], "_visit_eagerly": _visited}


class _TracedHook(ModuleHook):
    """A hook that calls the operators, in compiled code and in code that a stance runs eagerly."""

    def __init__(self, tap: TracedTap, name: str, *, is_gradient: bool) -> None:
        self.key = f"|{tap.key}|"
        self.token = new_token(self)
        self.is_gradient = is_gradient
        self.is_recorded = True
        self._tap = tap
        self._name = name
        self._sites: dict[str, Site] = {}
        self.seen: set[str] = set()
        """The paths received in the current call of the module, if calls are kept apart."""

    def receive(self, path: str, tensor: Tensor) -> None:
        """Pass a tensor to the tap. Called by the operators."""
        # Ignore forward hooks that a checkpoint repeats inside the backward pass.
        if not self.is_gradient and in_backward():
            return
        if self._tap.per_call:
            path = self._path_of_call(path)
        site = self._sites.get(path)
        if site is None:
            site = self._sites[path] = Site(self._name, path)
            self._tap.called.add(self._name)
        self._tap._guarded(self._name, site, self._record, path, tensor)

    def _path_of_call(self, path: str) -> str:
        """Return the path with the number of the call. Receiving a path again starts the next call."""
        if not self.seen or path in self.seen:
            self.seen.clear()
            self._tap._count_call(self._name)
        self.seen.add(path)
        return path + self._tap._suffix(self._name)

    def _record(self, name: str, path: str, tensor: Tensor) -> None:
        self._tap.called.add(name)
        self._tap._pass_on(name, [(path, tensor)])

    def watch(self, path: str, tensor: Tensor) -> None:
        """Register a hook that passes the gradient of a tensor to the tap. Called by the operators."""
        # Ignore forward hooks that a checkpoint repeats inside the backward pass.
        if not in_backward():
            self._tap.watch(tensor, partial(self.receive, path))

    def visit(self, tensor: Tensor, path: str, given: list[Tensor] | None) -> Tensor:
        """Record a tensor or its gradient. Return the tensor that replaces it in the graph."""
        if not self.is_gradient:
            torch.ops.lightning_recorder.receive(self.token, tensor, path)
        elif not (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor
        elif given is None:
            torch.ops.lightning_recorder.watch(self.token, tensor, path)
        else:
            result: Tensor = torch.ops.lightning_recorder.probe(tensor, self.token, path, given)
            return result
        return tensor


class _OutputHook(_TracedHook):
    """A forward hook."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        # In unrecorded steps, this is the only condition in the graph and thus the only guard.
        if not compiled_operators.ACTIVE:
            return None
        if not self.is_recorded or self.key not in compiled_operators.ACTIVE:
            return None
        # Do not replace a returned input, because autograd would sum the gradients of its other uses in another order.
        given = _tensors((args, kwargs)) if self.is_gradient and not getattr(module, "inplace", False) else []
        if torch.compiler.is_compiling():
            return _visited(output, "out", self.visit, given)
        return None if is_tracing() else self._tap._visit_eagerly(output, "out", self.visit, given)


class _InputHook(_TracedHook):
    """A forward pre-hook."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not compiled_operators.ACTIVE:
            return
        if not self.is_recorded or self.key not in compiled_operators.ACTIVE:
            return
        if torch.compiler.is_compiling():
            _visited(args, "in", self.visit)
            _visited(kwargs, "in", self.visit)
        elif not is_tracing():
            self._tap._visit_eagerly(args, "in", self.visit)
            self._tap._visit_eagerly(kwargs, "in", self.visit)


def _visited(value: Any, path: str, visit: _Visit, given: list[Tensor] | None = None) -> Any:
    """Return a copy of a nested value with each tensor replaced by ``visit``. Paths are as for ``iter_tensors``.

    torch.compile traces this function, so it uses only simple constructs.
    """
    if isinstance(value, Tensor):
        return visit(value, path, given)
    kind = type(value)
    is_named = isinstance(value, tuple) and hasattr(kind, "_fields")
    if not (is_named or kind is dict or kind is list or kind is tuple):
        given = None  # values of other classes, such as ModelOutput, are not copied
    parts = [part if suffix is None else _visited(part, path + suffix, visit, given) for suffix, part in _parts(value)]
    if given is None:
        return value
    if kind is dict:
        return dict(zip(value, parts, strict=True))
    return kind(*parts) if is_named else kind(parts)


def _parts(value: Any) -> list[tuple[str | None, Any]]:
    """Return the entries of a container with their path suffixes; the suffix is ``None`` for an unrecorded entry."""
    kind = type(value)
    if isinstance(value, dict):
        return [(_suffix(key) if isinstance(key, str) else None, part) for key, part in value.items()]
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return [(f".{name}", part) for name, part in zip(kind._fields, value, strict=True)]
    if isinstance(value, (tuple, list)):
        return [(f"[{index}]", part) for index, part in enumerate(value)]
    if hasattr(kind, "__dataclass_fields__"):
        return [(f".{name}", getattr(value, name, None)) for name in kind.__dataclass_fields__]
    return []


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for _, part in _parts(value) for tensor in _tensors(part)]


def _suffix(key: str) -> str:
    return f".{key}" if key.isidentifier() else f"[{key!r}]"
