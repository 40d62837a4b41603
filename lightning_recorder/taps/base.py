"""What every tap is: hooks on chosen modules that are put on and surely taken off together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from lightning_recorder.autograd import is_transformed
from lightning_recorder.errors import RecordingError, tell
from lightning_recorder.hooks import ModuleHook
from lightning_recorder.unrecorded import unrecorded

__all__ = ["Receiver", "Site", "Tap"]

_FEW_HANDLES = 256


class Site(NamedTuple):
    """Where a tensor was seen."""

    name: str
    """The module's name."""
    path: str
    """The tensor's path in the module's output: ``out`` when the output is the tensor itself."""


Receiver = Callable[[Site, Tensor], None]
"""Takes one detached tensor; must not keep it, because an in-place operation may change it later."""


class Tap(ABC):
    """Hooks on modules that hand each tensor to a receiver while the tap is attached.

    A tap is a context manager. When it is left, in whatever way, no hook of it is on any module or tensor. Attaching
    anew is cheap, so a tap is put on for the steps that are recorded and on the others costs nothing at all.

    Args:
        modules: The modules by name.
        receive: Called with the site and the tensor, inside the hook, without autograd.
        strict: Raise what goes wrong in ``receive`` instead of warning once and leaving that module alone from then on.

    Raises:
        RecordingError: From the model's forward or backward pass, if ``strict`` and ``receive`` raised; names the
            module.

    Note:
        Values, gradients, random numbers and the autograd graph of the model stay as they are. Nothing is kept of the
        step.
    """

    def __init__(self, modules: Mapping[str, nn.Module], receive: Receiver, *, strict: bool = False) -> None:
        self.modules = dict(modules)
        self.strict = strict
        self._receive = receive
        self._handles: list[RemovableHandle] = []
        self._quiet: set[str] = set()
        self._prune_at = _FEW_HANDLES

    @abstractmethod
    def _see_output(self, name: str, output: Any) -> None:
        """Handle one output of the module called ``name``; runs in its forward hook."""

    @property
    def attached(self) -> bool:
        """Whether the hooks are on."""
        return bool(self._handles)

    def attach(self) -> None:
        """Put the hooks on; attached already, nothing."""
        if self._handles:
            return
        try:
            for name, module in self.modules.items():
                if name not in self._quiet:
                    # TorchScript modules, for one, take no hooks.
                    self._guarded(name, self._put_on, module)
        except BaseException:
            self.remove()
            raise

    def _keep(self, handle: RemovableHandle) -> None:
        """Remember a tensor's hook, and forget those whose tensors are gone, now and then, so that it costs nothing."""
        self._handles.append(handle)
        if len(self._handles) > self._prune_at:
            self._handles = [each for each in self._handles if each.hooks_dict_ref() is not None]
            self._prune_at = max(_FEW_HANDLES, 2 * len(self._handles))

    def _put_on(self, name: str, module: nn.Module) -> None:
        self._handles.append(module.register_forward_hook(_OutputHook(self, name)))

    def remove(self) -> None:
        """Take every hook off, from modules and tensors; not attached, nothing."""
        while self._handles:
            self._handles.pop().remove()

    def __enter__(self) -> Self:
        self.attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _guarded(self, name: str, function: Callable[..., None], *args: Any) -> None:
        """Call a function of ours from a hook so that its failure does not become the model's."""
        if name in self._quiet:
            return
        try:
            with unrecorded():
                function(name, *args)
        except Exception as error:
            message = f"{type(self).__name__} could not record module {name!r}: {type(error).__name__}: {error}"
            if self.strict:
                raise RecordingError(message) from error
            self._quiet.add(name)
            tell(f"{message}. It is left alone from now on; strict=True raises instead.")

    def _hand_over(self, name: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for path, tensor in tensors:
            if _has_values(tensor):
                self._receive(Site(name, path), tensor.detach())


def _has_values(tensor: Tensor) -> bool:
    """Whether the tensor's numbers can be read here and now, as those of a plain array."""
    plain = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested
    return plain and not is_transformed(tensor)


class _OutputHook(ModuleHook):
    """The forward hook of a tap."""

    def __init__(self, tap: Tap, name: str) -> None:
        self._tap = tap
        self._name = name

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # Under torch.compile the hook would be traced into the graph; what is compiled is recorded in eager steps only.
        if not torch.compiler.is_compiling() and not torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]  # public, though not declared so
            self._tap._guarded(self._name, self._tap._see_output, output)
