"""Snapshots of everything that running a model may change: module state, inputs and random number generators."""

from __future__ import annotations

import copy
import operator
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_recorder.internals.module_tree import (
    attributes_of,
    bases_of,
    children_of,
    class_attribute,
    class_name,
    hookable,
    is_a,
    is_scripted,
    is_training,
    modules_of,
    own_buffers_of,
    own_parameters_of,
    package_of,
    plain_dict,
    put_entry,
    table_of,
    tables_of,
)
from lightning_recorder.internals.pause_recording import pause_recording
from lightning_recorder.internals.storage import is_uninitialized
from lightning_recorder.structure import iter_tensors

__all__ = ["ModuleState", "own_copies", "read_extra_repr", "same_gradients", "same_random_numbers"]


class ModuleState:
    """Snapshot of everything that a forward pass may change in a net's modules.

    :meth:`restore` restores:

    - the attributes of each module, including buffers and parameters, as the original objects;
    - the contents of lists, dictionaries and sets in the attributes, including hooks;
    - the values of buffers and of other tensors in the attributes, except parameters;
    - the states of random number generators.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.parameters: dict[int, Tensor] = {}
        """All parameters found, by id, including the parameters of unregistered modules."""
        self._taken: set[int] = set()
        self._flags: list[tuple[nn.Module, bool]] = []
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._contents: dict[int, tuple[Any, Any]] = {}
        self._empty: list[Any] = []
        """The empty containers, of which each module has a dozen."""
        self._values: dict[int, tuple[Tensor, Tensor]] = {}
        self._generators: dict[int, tuple[Callable[[Any], object], Any]] = {}
        for module in modules:
            if is_scripted(module):
                # A ScriptModule has its own tables and exposes no attributes.
                self.parameters |= {id(each): each for each in own_parameters_of(module).values()}
                if hasattr(module, "training"):  # missing on a frozen TorchScript module
                    self._flags.append((module, module.training))
                self._keep(own_buffers_of(module).values())
            elif not _is_lazy(module):
                self.take(module)
            else:
                self.parameters |= {id(each): each for each in own_parameters_of(module).values()}
                self._flags.append((hookable(module), is_training(module)))

    def take(self, module: nn.Module) -> None:
        """Save the state of a module. Idempotent.

        A lazy module is not saved until it has been initialized, right before its first call.
        """
        if id(module) in self._taken:
            return
        self._taken.add(id(module))
        table = attributes_of(module)
        self._tables.append((table, dict(table)))
        parameters, buffers, modules = tables_of(module)
        for each in parameters.values():
            if each is not None:
                self.parameters[id(each)] = each
        for name, before in (("_parameters", parameters), ("_modules", modules)):
            if before:
                # Save these tables without searching their entries.
                self._contents[id(table[name])] = table[name], dict(before)
        if buffers and type(table["_buffers"]) not in _CONTAINERS:
            self._contents[id(table["_buffers"])] = table["_buffers"], dict(buffers)
            self._keep(buffers.values())
        self._keep(table.values())

    def _keep(self, values: Iterable[Any]) -> None:
        """Save the contents of these values, at any depth of nesting."""
        todo = list(values)
        while todo:
            value = todo.pop()
            kind: type = type(value)
            if kind in _PLAIN:
                continue
            if kind in _CONTAINERS:
                if not value:
                    self._empty.append(value)
                elif id(value) not in self._contents:
                    # The copy methods of containers are several times as fast as copy.copy.
                    self._contents[id(value)] = value, value.copy()
                    todo += value.values() if isinstance(value, dict) else value
            elif is_a(value, Tensor):
                if isinstance(value, nn.Parameter):
                    self.parameters[id(value)] = value
                elif not is_uninitialized(value):
                    self._values.setdefault(id(value), (value, value.detach().clone()))
            elif is_a(value, nn.Module):
                # A module in a plain list is not a submodule, but may be called like one.
                for each in modules_of(value):
                    if not is_scripted(each) and not _is_lazy(each):
                        self.take(each)
            elif is_a(value, torch.Generator):
                self._generators.setdefault(id(value), (value.set_state, value.get_state()))
            elif is_a(value, random.Random):
                self._generators.setdefault(id(value), (value.setstate, value.getstate()))
            elif is_a(value, _numpy().random.Generator):
                bits = value.bit_generator
                self._generators.setdefault(id(bits), (partial(setattr, bits, "state"), bits.state))

    def restore(self) -> None:
        """Restore the saved state."""
        for table, before in self._tables:
            for key in [key for key in table if key not in before]:
                del table[key]
            table.update(before)
        for container, before in self._contents.values():
            _refill(container, before)
        for container in self._empty:
            if container:
                container.clear()
        for module, training in self._flags:
            if module.training != training:
                module.training = training
        for tensor, values in self._values.values():
            # Restore all tensors, even with an unchanged version: BatchNorm writes its running statistics without
            # increasing the version. Write through ``.data``, because with a higher version, autograd would reject
            # graphs that saved the tensor.
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                if tensor.shape != values.shape:
                    tensor.data = values
                elif not _same(tensor, values):  # unchanged tensors may be mapped from a read-only file
                    tensor.data.copy_(values)
        for put_back, state in self._generators.values():
            put_back(state)


def read_extra_repr(module: nn.Module) -> str:
    """Return the text of ``extra_repr``, and undo its side effects. Empty if it raises or returns no string."""
    kind = type(module)
    described = class_attribute(kind, "extra_repr")
    if described is nn.Module.extra_repr:
        return ""
    # ``parametrize`` gives each parametrized module a separate class, whose properties compute the tensors. The
    # original class reads the same names from the tables.
    before = bases_of(kind)[1]
    if class_name(kind) == f"Parametrized{class_name(before)}" and "parametrizations" in table_of(module, "_modules"):
        kind, described = before, class_attribute(before, "extra_repr")
    try:
        if package_of(kind) == "torch":
            text: object = described(_stand_in(module, kind))
        else:
            # Imported here because it needs NumPy, which is not needed to read a graph.
            from lightning_recorder.internals.random_states import foreign_code

            state = ModuleState(modules_of(module))
            try:
                with pause_recording(), foreign_code():
                    text = described(_stand_in(module, kind))
            finally:
                state.restore()
    except (Exception, SystemExit):  # noqa: BLE001 - a class may raise anything in its representation
        return ""
    return text if type(text) is str else ""


def _stand_in(module: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """Return the module, or a copy with plain tables; for a parametrized module, with the original tensors."""
    attributes, tables = attributes_of(module), tables_of(module)
    if type(module) is kind and all(map(operator.is_, map(attributes.get, _TABLES), tables)):
        return module
    stand: nn.Module = object.__new__(kind)
    vars(stand).update(attributes, **dict(zip(_TABLES, map(dict, tables), strict=True)))
    if type(module) is not kind:
        for name, each in children_of(tables[2]["parametrizations"]):
            vars(stand)["_parameters"][name] = next(iter(own_parameters_of(each).values()), None)
    return stand


def _same(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors of the same shape have equal values, with NaN equal to NaN."""
    try:
        return bool(((one == other) | ((one != one) & (other != other))).all())
    except (NotImplementedError, RuntimeError):  # sparse, quantized and fake tensors are not supported
        return False


# Types without any state, checked first because a module has many attributes of them.
_PLAIN = frozenset((type(None), bool, int, float, str, tuple))

_TABLES = ("_parameters", "_buffers", "_modules")

# Exact types only, because a subclass may run arbitrary code when it is refilled.
_CONTAINERS = frozenset((list, dict, set, deque, OrderedDict, defaultdict, Counter))


def _refill(container: Any, before: Any) -> None:
    """Restore the contents of a container in their original order."""
    if isinstance(container, dict) and type(container) not in _CONTAINERS:  # a table whose class is a user's
        if _identities(plain_dict(container)) != _identities(before):
            (OrderedDict if isinstance(container, OrderedDict) else dict).clear(container)
            for key, value in before.items():
                put_entry(container, key, value)
    elif (container or before) and _identities(container) != _identities(before):
        container.clear()
        (container.extend if isinstance(container, (list, deque)) else container.update)(before)


def _identities(container: Any) -> list[int]:
    values = container.values() if isinstance(container, dict) else ()
    return [*map(id, container), *map(id, values)]


def _is_lazy(module: nn.Module) -> bool:
    parameters, buffers, _ = tables_of(module)
    return any(map(is_uninitialized, (*parameters.values(), *buffers.values())))


def own_copies(values: Mapping[Any, Any], copied: Callable[[Tensor], Tensor] = Tensor.clone) -> dict[Any, Any]:
    """Return copies that the net may write to. The function ``copied`` copies each detached tensor, at any depth."""
    # copy.deepcopy rejects tensors computed by autograd, so put their copies into the memo. The memo also preserves
    # identity, because attention checks whether its query is its key.
    tensors = [tensor for _, tensor in iter_tensors(values)]
    memo = {id(each): _like(each, copied(each.detach())) for each in tensors}
    return {key: _copied(value, memo) for key, value in values.items()}


def _like(tensor: Tensor, copied: Tensor) -> Tensor:
    """Return a copy that autograd treats like the tensor."""
    if not tensor.requires_grad:
        return copied
    leaf = copied.requires_grad_()
    # In-place writes are allowed on a computed tensor, but not on a leaf that requires a gradient.
    with torch.enable_grad():
        return leaf if tensor.is_leaf else leaf.clone()


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # noqa: BLE001 - copying may raise anything, and then the object itself is passed
        return value


def _numpy() -> Any:
    """Return NumPy, which is imported when a model is run, and not needed to read a recorded graph."""
    import numpy as np

    return np


@contextmanager
def same_random_numbers(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore the random number generators of torch, Python and NumPy on exit."""
    numpy = _numpy().random
    places: dict[str, set[int]] = {}
    for device in devices:
        if device.type not in ("cpu", "meta"):
            places.setdefault(device.type, set()).add(device.index or 0)
    python, legacy = random.getstate(), numpy.get_state()  # nets draw from the global generators
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([]))
        for kind, indices in places.items():
            stack.enter_context(torch.random.fork_rng(sorted(indices), device_type=kind))
        try:
            yield
        finally:
            random.setstate(python)
            numpy.set_state(legacy)


@contextmanager
def same_gradients(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore ``grad`` and ``requires_grad`` of leaf tensors on exit. Inside the block, the gradients are None."""
    # Set the gradients aside without copying, so that a backward pass creates new gradients instead of adding to these.
    leaves = [(each, each.requires_grad, each.grad) for each in tensors if each.is_leaf]
    for leaf, _, gradient in leaves:
        if gradient is not None:
            leaf.grad = None
    try:
        yield
    finally:
        for leaf, requires_grad, gradient in leaves:
            if leaf.requires_grad != requires_grad:
                leaf.requires_grad_(requires_grad)
            if leaf.grad is not gradient:
                leaf.grad = gradient
