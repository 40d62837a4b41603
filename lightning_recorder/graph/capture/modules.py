"""The names of a model's modules, parameters and buffers, with parameter counts."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import islice

import torch
from torch import Tensor, nn

from lightning_recorder.graph.capture.builder import Draft, GraphBuilder
from lightning_recorder.graph.model import Kind
from lightning_recorder.internals.module_tree import (
    class_name,
    is_scripted,
    is_training,
    modules_of,
    named_buffers_of,
    named_parameters_of,
    own_parameters_of,
    parameters_of,
    tables_of,
)
from lightning_recorder.internals.storage import is_uninitialized
from lightning_recorder.module_names import modules_in_containers, named_submodules

__all__ = ["FUSED", "ModelNames", "count", "count_below", "count_own", "is_fused", "is_opaque", "note_used"]


def count(parameters: Iterable[Tensor]) -> int:
    """Return the total number of elements of the parameters. Uninitialized parameters count 0."""
    return sum(each.numel() for each in parameters if is_initialized(each))


def is_initialized(parameter: Tensor) -> bool:
    """Return False for a lazy parameter that has no shape yet."""
    return type(parameter) is nn.Parameter or not is_uninitialized(parameter)


def own_parameters(module: nn.Module) -> list[Tensor]:
    """Return the parameters of a module without its submodules, even if its class overrides ``parameters``."""
    if is_scripted(module):
        return list(own_parameters_of(module).values())
    return [each for each in tables_of(module)[0].values() if each is not None]


def count_own(module: nn.Module) -> int:
    """Return the number of elements of a module's parameters, without its submodules."""
    return count(own_parameters(module))


def count_below(module: nn.Module) -> int:
    """Return the number of elements of the parameters of a module and its submodules. Shared parameters count once."""
    found = {id(each): each for inner in modules_of(module) for each in own_parameters(inner)}
    return count(found.values())


def note_used(builder: GraphBuilder, registered: Set[str], unobserved: Set[int]) -> None:
    """Set the number of used parameters of each module call.

    A parameter is used if it has an outgoing edge. It counts for every module that contains it under one of its names.

    The numbers stay unknown for ``unobserved`` calls, in which some computation was not observed, and for the calls
    around them.
    """
    nodes, sources = builder.nodes, builder.used()
    if nodes[0].failed:
        return
    used = {nodes[number].name: nodes[number] for number in builder.of_kind("parameter") if number in sources}
    # Usually all parameters are used.
    below = None if used.keys() == registered else _count_below(used, registered)
    unknown = set(unobserved)
    for number in unobserved:
        while (parent := nodes[number].parent) is not None:
            unknown.add(number := parent)
    for number in builder.of_kind("module"):
        if number not in unknown:
            node = nodes[number]
            total = node.total_parameters
            node.used_parameters = total if below is None else min(below.get(node.name, 0), total)


def _count_below(parameters: Mapping[str, Draft], registered: Set[str]) -> dict[str, int]:
    """Return the number of elements of the given parameters that each module contains.

    Layers in a Python list do not count for the module with the list, because it does not register them.
    """
    below: dict[str, int] = {}
    strange = parameters.keys() - registered
    inside = {one for name in registered for one in around(name)} if strange else set[str]()
    for name, node in parameters.items():
        size = sum(math.prod(meta.shape) for meta in node.outputs)
        found = {one for path in (name, *node.tied) for one in around(path)}
        for each in found - inside if name in strange else found:
            below[each] = below.get(each, 0) + size
    return below


def around(name: str) -> list[str]:
    """Return the names of the modules around a parameter or a module, from the innermost to the root."""
    found = []
    while name:
        name = name.rpartition(".")[0]
        found.append(name)
    return found


# In eval mode these modules compute everything in one fused function. While a function mode is active, they use another
# implementation, whose results differ in the last bits and in padded rows. So the mode is removed while they run.
FUSED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


class _NamedModule(weakref.ref[nn.Module]):
    """A weak reference to a module, with its name and the number of its direct submodules and parameters."""

    __slots__ = ("name", "size")
    name: str
    size: int


class _NamedTensor(weakref.ref[Tensor]):
    """A weak reference to a parameter or buffer, with its kind, its name, and the id of the module that owns it."""

    __slots__ = ("known",)
    known: tuple[Kind, str, int]


class ModelNames:
    """The names of the modules that a recording may observe, and of their parameters and buffers.

    Registered modules have their dotted names. A module in a plain list, tuple or dictionary is named by its location,
    such as ``blocks[0]``. A module that does not belong to the model is named by its class when it is called.
    """

    def __init__(self, registered: Mapping[str, nn.Module]) -> None:
        # Keyed by id. Python reuses ids of freed objects, so each value is a weak reference to check the object.
        self._names: dict[int, _NamedModule] = {}
        self._tensors: dict[int, _NamedTensor] = {}
        self._aliases: dict[int, tuple[str, ...]] = {}
        self._counts: dict[str, int] = {}
        for name, each in registered.items():
            self._introduce(name, each)
        self._registered = list(self._names.values())
        self._own = list(self._tensors.values())
        for name, each in list(modules_in_containers(registered)):
            if self.of(each) is None:
                self._welcome(name, each)

    def of(self, module: nn.Module) -> str | None:
        """Return the name of a module, or None if it has none."""
        reference = self._names.get(id(module))
        return reference.name if reference is not None and reference() is module else None

    def module(self, key: int) -> nn.Module | None:
        """Return the module with an id; ``None`` if it is unknown or was freed."""
        reference = self._names.get(key)
        return None if reference is None else reference()

    def of_stranger(self, module: nn.Module) -> str | None:
        """Name a called module that has no name and return the name; ``None`` if the module must stay unnamed."""
        # A wrapper of a named module needs no name. TorchScript modules get no name either, because TorchScript returns
        # new submodule objects at each access.
        wraps = any(each is not module and self.of(each) is not None for each in modules_of(module))
        if is_scripted(module) or wraps:
            return None
        self._welcome(class_name(type(module)), module)
        return self.of(module)

    def tensor(self, tensor: Tensor) -> tuple[Kind, str, int] | None:
        """Return the kind of a parameter or buffer, its name, and the id of the module that owns it."""
        reference = self._tensors.get(id(tensor))
        return reference.known if reference is not None and reference() is tensor else None

    def references(self) -> dict[str, weakref.ref[nn.Module]]:
        """Return a weak reference to each module, by its name."""
        return {reference.name: reference for reference in self._names.values()}

    def aliases(self, tensor: Tensor) -> tuple[str, ...]:
        """Return the further names of a parameter or buffer that is registered more than once."""
        return self._aliases.get(id(tensor), ()) if self._aliases and self.tensor(tensor) is not None else ()

    def trained(self) -> dict[str, bool]:
        """Return whether each parameter of the model requires a gradient, by name.

        A shared parameter has its first name. Uninitialized parameters are left out.
        """
        return {name: each.requires_grad for name, each in self._parameters()}

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        for reference in self._own:
            kind, name, _ = reference.known
            if kind == "parameter" and (tensor := reference()) is not None and is_initialized(tensor):
                yield name, tensor

    def parameter_counts(self) -> dict[int, tuple[int, int]]:
        """Return two parameter counts for each registered module, by id: without and with its submodules.

        The result is empty if a parameter or module is registered more than once, or if the model has changed.
        """
        inner = 0
        for reference in self._registered:
            module = reference()
            if module is None:
                return {}
            parameters, _, children = tables_of(module)
            submodules = len(children)
            if submodules + len(parameters) != reference.size:
                return {}
            inner += submodules
        if self._aliases or inner != len(self._registered) - 1:
            return {}
        own: dict[str, int] = {}
        for path, tensor in self._parameters():
            around = path.rpartition(".")[0]
            own[around] = own.get(around, 0) + tensor.numel()
        below = dict(own)
        for reference in reversed(self._registered):  # inner modules come first
            name = reference.name
            if name and (number := below.get(name)):
                around = name.rpartition(".")[0]
                below[around] = below.get(around, 0) + number
        registered = islice(self._names.items(), len(self._registered))  # registered modules come first
        return {key: (own.get(each.name, 0), below.get(each.name, 0)) for key, each in registered}

    def registered(self) -> set[str]:
        """Return the names of the registered modules."""
        return {reference.name for reference in self._registered}

    def _introduce(self, name: str, module: nn.Module) -> None:
        """Add the names of a module and of its own parameters and buffers."""
        key = id(module)
        reference = self._names[key] = _NamedModule(module)
        parameters, buffers, submodules = tables_of(module)
        reference.name, reference.size = name, len(submodules) + len(parameters)
        self._counts.setdefault(name, 1)
        own: list[tuple[Kind, Iterable[tuple[str, Tensor | None]]]]
        if issubclass(type(module), torch.jit.ScriptModule):
            own = [
                ("parameter", named_parameters_of(module, recurse=False)),
                ("buffer", named_buffers_of(module, recurse=False)),
            ]
        elif buffers:
            own = [("parameter", parameters.items()), ("buffer", buffers.items())]
        else:
            own = [("parameter", parameters.items())] if parameters else []
        around = f"{name}." if name else ""
        for kind, tensors in own:
            for path, tensor in tensors:
                if tensor is None:
                    continue
                known = self._tensors.get(id(tensor))
                # Another tensor may have had the same id before.
                if known is None or known() is not tensor:
                    known = self._tensors[id(tensor)] = _NamedTensor(tensor)
                    known.known = kind, around + path, key
                    if self._aliases:
                        self._aliases.pop(id(tensor), None)
                else:
                    self._aliases[id(tensor)] = (*self._aliases.get(id(tensor), ()), around + path)

    def _welcome(self, name: str, module: nn.Module) -> None:
        """Add a unique name for a module that the model does not register, and names for its submodules."""
        unique = name
        while unique in self._counts:
            self._counts[name] += 1
            unique = f"{name}#{self._counts[name]}"
        for path, each in named_submodules(module).items():
            if self.of(each) is None:
                self._introduce(f"{unique}.{path}" if path else unique, each)


def is_fused(module: nn.Module) -> bool:
    """Return True if a module may compute everything in one fused function. torch does so only without gradients."""
    if not issubclass(type(module), FUSED) or is_training(module):
        return False
    return not (torch.is_grad_enabled() and any(each.requires_grad for each in parameters_of(module)))


def is_opaque(module: nn.Module) -> bool:
    """Return True if the computation inside a module is not observed at all."""
    return is_fused(module) or is_scripted(module)
