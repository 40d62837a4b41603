"""What a run of a model may change, kept and put back: its modules' state, its inputs, the random numbers."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_recorder.structure import iter_tensors

__all__ = ["ModuleState", "is_uninitialized", "own_copies", "same_random_numbers"]


class ModuleState:
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


def _copied_tensor(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def own_copies(values: Mapping[Any, Any], copied: Callable[[Tensor], Tensor] = _copied_tensor) -> dict[Any, Any]:
    """Copies with tensors that the net may write to.

    Args:
        values: Of any kind, with tensors in any nesting.
        copied: Makes the tensor that stands in the place of one.
    """
    # copy.deepcopy refuses tensors that autograd has computed, so it is told beforehand what to put in their place.
    # What is given twice stays one: attention asks whether its query is its key.
    tensors = [tensor for _, tensor in iter_tensors(values)]
    memo = {id(each): copied(each) for each in tensors}
    return {key: _copied(value, memo) for key, value in values.items()}


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # noqa: BLE001 - an object may refuse to be copied in any way; it is then given as it is
        return value


@contextmanager
def same_random_numbers(devices: Iterable[torch.device]) -> Iterator[None]:
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
