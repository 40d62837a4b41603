"""A tap whose hooks torch.compile traces, so that compiled code records without leaving it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_recorder.internals import compiled_operators
from lightning_recorder.internals.autograd import in_backward, is_tracing
from lightning_recorder.internals.compiled_operators import new_token, operators, skip_frames_of, switch
from lightning_recorder.internals.hooks import ModuleHook
from lightning_recorder.taps.base import Receiver, Site, Tap
from lightning_recorder.taps.forward import InputTap
from lightning_recorder.taps.gradient import GradientTap

__all__ = ["TracedTap"]

_Visit = Callable[[Tensor, str], Tensor]


class TracedTap(Tap):
    """Records the tensors of modules whose calls are compiled, in the compiled code.

    :meth:`install` registers the hooks. torch.compile traces them when it compiles the modules. While the tap is
    attached, calls run a second graph that records; otherwise they run the same graph as without the tap.

    Values, gradients and random numbers do not change. Tensors in tuples, named tuples, lists and dictionaries with
    strings as keys are recorded, but not those in other containers. In subclasses of these classes, other than named
    tuples, gradients are not recorded.

    Args:
        modules: The modules by name.
        receive: The receiver, as for :class:`~lightning_recorder.taps.Tap`.
        like: The class of the tap that records the same tensors outside of compiled code: ``InputTap``, ``OutputTap``
            or ``OutputGradientTap``.
        key: A key of the recording. Taps with equal keys are switched together, so that there are fewer graphs. Taps
            that record other modules need another key, because compiled code stays in use after the tap is gone.
        others: Further modules whose calls are compiled. Modules of the same class may share compiled code. Hooks on
            those that are not recorded keep that code apart while the tap is attached.
        condition: The condition, as for :class:`~lightning_recorder.taps.Tap`. It is evaluated at run time.
        strict: The error handling, as for :class:`~lightning_recorder.taps.Tap`.

    Note:
        With :attr:`per_call`, the calls of a module are numbered as its tensors arrive. In a backward pass they arrive
        in another order, so the calls of gradients cannot be kept apart.

        Gradients of inputs are not supported, since recording them changes the order in which autograd sums the
        gradients of a tensor with several uses. For the same reason, the gradient of a module that returns its input,
        such as ``nn.Identity``, is not recorded, except for modules with ``inplace=True``. The gradient of an output
        is that of its uses after the module has returned it: if the module itself also uses it, that part is missing.
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

    def install(self) -> bool:
        """Register the hooks; return False if this version of torch cannot trace them. Idempotent."""
        if not self._hooked and operators():
            self._hooked = True
            for kind in (_OutputHook, _InputHook):
                # The hooks of a module that is compiled itself are called outside of its graph.
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
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._hooks.append(before)
        else:
            after = _OutputHook(self, name, is_gradient=is_gradient)
            self._handles.append(module.register_forward_hook(after, with_kwargs=True))
            self._hooks.append(after)

    @override
    def attach(self) -> None:
        if not self._attached and self.install():
            self._attached = True
            self._calls.clear()
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
        return {**super().__getstate__(), "_hooks": [], "_visit_eagerly": _visited}


class _TracedHook(ModuleHook):
    """A hook that calls the operators, both in compiled code and if a stance runs the code eagerly."""

    def __init__(self, tap: TracedTap, name: str, *, is_gradient: bool) -> None:
        self.key = f"|{tap.key}|"
        self.token = new_token(self)
        self.is_gradient = is_gradient
        self.is_recorded = True
        self._tap = tap
        self._name = name
        self._sites: dict[str, Site] = {}
        self.seen: set[str] = set()
        """The paths that were received in the current call of the module, if its calls are kept apart."""

    def receive(self, path: str, tensor: Tensor) -> None:
        """Pass a tensor to the tap. Called by the operators."""
        # A checkpoint repeats forward hooks inside the backward pass.
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
        """Return the path with the number of the call. A path that is received again belongs to the next call."""
        if not self.seen or path in self.seen:
            self.seen.clear()
            self._tap._count_call(self._name)
        self.seen.add(path)
        return path + self._tap._suffix(self._name)

    def _record(self, name: str, path: str, tensor: Tensor) -> None:
        self._tap.called.add(name)
        self._tap._pass_on(name, [(path, tensor)])

    def visit(self, tensor: Tensor, path: str) -> Tensor:
        """Record a tensor, or its gradient, and return the tensor to use instead of it."""
        if not self.is_gradient:
            torch.ops.lightning_recorder.receive(self.token, tensor, path)
        elif tensor.requires_grad and torch.is_grad_enabled():
            result: Tensor = torch.ops.lightning_recorder.probe(tensor, self.token, path)
            return result
        return tensor


class _OutputHook(_TracedHook):
    """A forward hook."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        # This is the only condition in the graph of unrecorded steps, and thus their only guard.
        if not compiled_operators.ACTIVE:
            return None
        if not self.is_recorded or self.key not in compiled_operators.ACTIVE:
            return None
        if self.is_gradient and isinstance(output, Tensor) and not getattr(module, "inplace", False):
            for each in (*args, *kwargs.values()):
                if each is output:
                    return None  # other uses of the input would be summed in another order
        if torch.compiler.is_compiling():
            return _visited(output, "out", self.visit)
        return None if is_tracing() else self._tap._visit_eagerly(output, "out", self.visit)


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


def _visited(value: Any, path: str, visit: _Visit) -> Any:
    """Return a nested value with the tensors that ``visit`` returns. The paths are those of ``iter_tensors``.

    torch.compile traces this function, so it uses only simple constructs.
    """
    if isinstance(value, Tensor):
        return visit(value, path)
    kind = type(value)
    if isinstance(value, dict):
        found = {}
        for key, part in value.items():
            found[key] = _visited(part, path + _suffix(key), visit) if isinstance(key, str) else part
        return found if kind is dict else value  # other classes, such as ModelOutput, are not copied
    if not isinstance(value, (tuple, list)):
        return value
    is_named = hasattr(kind, "_fields")
    parts = []
    for index, part in enumerate(value):
        suffix = f".{kind._fields[index]}" if is_named else f"[{index}]"
        parts.append(_visited(part, path + suffix, visit))
    if is_named:
        return kind(*parts)
    if kind is list:
        return parts
    return tuple(parts) if kind is tuple else value


def _suffix(key: str) -> str:
    return f".{key}" if key.isidentifier() else f"[{key!r}]"
