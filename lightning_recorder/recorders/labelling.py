"""The run in which a net's calls are labelled, which leaves no trace of itself."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_recorder.errors import RecordingError
from lightning_recorder.recorders.calls import CallWatch
from lightning_recorder.structure import iter_tensors
from lightning_recorder.unrecorded import unrecorded

__all__ = ["Snapshot", "is_uninitialized", "run_without_trace"]


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
            # What TorchScript compiled has tables of its own, and shows no attributes.
            if not isinstance(module, torch.jit.ScriptModule) and not any(
                is_uninitialized(each) for each in (*module._parameters.values(), *module._buffers.values())
            ):
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
    with unrecorded():
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
