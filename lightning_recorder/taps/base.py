"""What every tap is: hooks on chosen modules that are put on and surely taken off together."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from lightning_recorder.autograd import in_transform, is_tracing, is_transformed
from lightning_recorder.errors import ArgumentError, RecordingError, check_callable, describe_error, tell
from lightning_recorder.hooks import ModuleHook
from lightning_recorder.stance import EagerStance
from lightning_recorder.stopwatch import Stopwatch
from lightning_recorder.structure import describe_unknown, iter_tensors
from lightning_recorder.unrecorded import is_unrecorded, unrecorded

__all__ = ["Receiver", "Site", "Tap"]

_FEW_HANDLES = 256
_PATH = "_lightning_recorder_path"  # where an error that a receiver raised says of which tensor
# One for all taps: it is held for an append, and a lock of its own would keep a tap from being copied.
_LOCK = threading.Lock()


class Site(NamedTuple):
    """Where a tensor was seen."""

    name: str
    """The module's name."""
    path: str
    """The tensor's path at the module: ``out`` for the output and ``out.logits`` inside it, ``in[0]`` for the first
    positional argument, ``in.mask`` for the keyword argument of that name; of a parameter its name in the module,
    ``weight``."""


Receiver = Callable[[Site, Tensor], None]
"""Takes one detached tensor; must not keep it, because an in-place operation may change it later."""


class Tap(ABC):
    """Hooks on modules that hand each tensor to a receiver while the tap is attached.

    A tap is a context manager. When it is left, in whatever way, no hook of it is on any module or tensor. Attaching
    anew is cheap, so a tap is put on for the steps that are recorded and on the others costs nothing at all.

    Args:
        modules: The modules by name.
        receive: Called with the site and the tensor, inside the hook, without autograd. The tensor is detached and no
            copy: read it or clone it, do not keep it, since the model may write to its memory, and do not write to it.
        condition: Called without arguments, once for each call of a module (of gradients for each one); where it gives
            something false, nothing is handed over.
        strict: Raise what goes wrong in ``receive`` or ``condition`` instead of warning once and leaving that module
            alone from then on.

    Raises:
        ArgumentError: If the modules are no mapping from names to modules, or what is to be called cannot be.
        RecordingError: From the model's forward or backward pass, if ``strict`` and ``receive`` or ``condition``
            raised; names the module.

    Note:
        Values, gradients, random numbers and the autograd graph of the model stay as they are. Nothing is kept of the
        step. Each model may be trained in a thread of its own. Compiled modules run eagerly while a tap is on, since
        hooks on compiled code never fire.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        receive: Receiver,
        *,
        condition: Callable[[], object] | None = None,
        strict: bool = False,
    ) -> None:
        self.modules = _checked(modules)
        check_callable("receive", receive, "(site, tensor)")
        if condition is not None:
            check_callable("condition", condition, "()")
        self.strict = strict
        self._receive = receive
        self._condition = condition
        self._attached = False
        self._hooked = False
        self._stance = EagerStance()
        self._handles: list[RemovableHandle] = []
        self.eager = True
        """Whether compiled code runs eagerly while the hooks are on."""
        self.stopwatch: Stopwatch | None = None
        """What measures the time inside the hooks, if anything does."""
        self.at_once: Callable[[Site, Tensor], bool] | None = None
        """What is asked before ``receive`` about a plain tensor that is not detached: it takes the tensor without any
        operation of torch and answers whether it did."""
        self.called: set[str] = set()
        """The names of the modules of which a hook was called; may be cleared."""
        self._quiet: set[str] = set()
        self._unknown: set[type] = set()
        self._prune_at = _FEW_HANDLES

    @abstractmethod
    def _put_on(self, name: str, module: nn.Module) -> None:
        """Put the hooks of one module on, and give each handle to :meth:`_keep`."""

    @property
    def attached(self) -> bool:
        """Whether the hooks are on."""
        return self._attached

    @property
    def failed(self) -> frozenset[str]:
        """The names of the modules that are left alone, since recording them failed."""
        return frozenset(self._quiet)

    def revive(self) -> None:
        """Record again what is left alone."""
        self._quiet.clear()

    def attach(self) -> None:
        """Put the hooks on; attached already, nothing."""
        if self._attached:
            return
        self._attached = True
        if self._hooked:
            return
        self._hooked = True
        try:
            if self.eager:
                self._stance.hold()
            for name, module in self.modules.items():
                # TorchScript modules, for one, take no hooks.
                self._guarded(name, self._put_on, module)
        except BaseException:
            self.remove()
            raise

    def pause(self) -> None:
        """Record nothing until :meth:`attach`, for which the hooks stay on, as between two steps that are recorded.

        Putting hooks on costs more than calling them in vain.
        """
        self._attached = False

    def remove(self) -> None:
        """Take every hook off, from modules and tensors; not attached, nothing."""
        self._attached = self._hooked = False
        with _LOCK:
            handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        self._stance.release()

    def __enter__(self) -> Self:
        self.attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __getstate__(self) -> dict[str, Any]:
        # A copy is on the copies of the modules, and not attached: the hooks in these do nothing.
        return {**self.__dict__, "_attached": False, "_hooked": False, "_handles": []}

    def _keep(self, handle: RemovableHandle) -> None:
        """Remember a hook, and forget now and then those whose tensors are gone, so that it costs nothing."""
        with _LOCK:
            self._handles.append(handle)
            if len(self._handles) > self._prune_at:
                self._handles = [each for each in self._handles if each.hooks_dict_ref() is not None]
                self._prune_at = max(_FEW_HANDLES, 2 * len(self._handles))
        if not self._attached:  # taken off by another thread while this one was inside a hook
            handle.remove()

    def _guarded(self, name: str, function: Callable[..., None], *args: Any) -> None:
        """Call a function of ours from a hook so that its failure does not become the model's."""
        if name in self._quiet or not self._attached or in_transform() or is_unrecorded():
            return
        watch = self.stopwatch
        started = None if watch is None else watch.start()
        try:
            with unrecorded():
                function(name, *args)
        except Exception as error:
            path = getattr(error, _PATH, None)
            at = "" if path is None else f" at {path!r}"
            message = f"{type(self).__name__} could not record module {name!r}{at}: {describe_error(error)}"
            if self.strict:
                raise RecordingError(message) from error
            self._quiet.add(name)
            tell(f"{message}. It is left alone from now on; strict=True raises instead.")
        finally:
            if watch is not None and started is not None:
                watch.stop(started)

    def _taken_at_once(self, site: Site, tensor: Tensor) -> bool:
        """Whether nothing is left to be done for a tensor: nearly all the time that a hook takes is for other cases."""
        if (
            self.at_once is None
            or type(tensor) is not Tensor
            or self._condition is not None
            or self.stopwatch is not None
            or not self._attached
            or site.name in self._quiet
            or in_transform()
            or is_unrecorded()
        ):
            return False
        try:
            return self.at_once(site, tensor)
        except Exception:  # noqa: BLE001 - what went wrong does so again where it is told
            return False

    def _hand_over(self, name: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        if self._condition is not None and not self._condition():
            return
        for path, tensor in tensors:
            # The values of a transformed tensor cannot be read here.
            if not is_transformed(tensor):
                try:
                    self._receive(Site(name, path), tensor.detach())
                except Exception as error:
                    with suppress(AttributeError):  # of an error that takes no attributes
                        setattr(error, _PATH, path)
                    raise

    def _tensors(self, name: str, value: Any, path: str) -> Iterable[tuple[str, Tensor]]:
        """The tensors in what the module of that name took or gave."""
        if isinstance(value, Tensor):  # as nearly always: no walk
            return ((path, value),)
        return iter_tensors(value, path, unknown=partial(self._tell_unknown, name))

    def _inputs(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """The tensors in the arguments of the module of that name."""
        yield from self._tensors(name, args, "in")
        yield from self._tensors(name, kwargs, "in")

    def _tell_unknown(self, name: str, path: str, found: object, error: Exception | None) -> None:
        if type(found) not in self._unknown:
            self._unknown.add(type(found))
            tell(f"{type(self).__name__} passes over {describe_unknown(name, path, found, error)}")


def _checked(modules: object) -> dict[str, nn.Module]:
    """The modules by name, if they are that."""
    if isinstance(modules, Mapping) and all(isinstance(module, nn.Module) for module in modules.values()):
        return dict(modules)
    raise ArgumentError(
        f"modules takes a mapping from names to modules, as Selection(...).resolve(model) gives it; got {modules!r:.80}"
    )


class TapHook(ModuleHook):
    """A hook on a module that belongs to one tap and calls a method of it with the name and what torch passes."""

    def __init__(self, tap: Tap, name: str, method: Callable[..., None]) -> None:
        self._tap = tap
        self._name = name
        self._method = method

    def __call__(self, module: nn.Module, *passed: Any) -> None:
        # Under torch.compile the hook would be traced into the graph; what is compiled is recorded in eager steps only.
        if torch.compiler.is_compiling() or is_tracing() or not self._tap.attached:
            return
        self._tap.called.add(self._name)
        self._tap._guarded(self._name, self._method, module, *passed)
