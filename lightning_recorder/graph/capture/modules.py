"""The names of a model's modules and of the tensors that they own, with the numbers of parameters."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from lightning_recorder.graph.capture.builder import Draft, GraphBuilder
from lightning_recorder.graph.model import Kind
from lightning_recorder.internals.module_tree import (
    attributes_of,
    is_a,
    is_scripted,
    is_training,
    modules_of,
    named_buffers_of,
    named_parameters_of,
    own_parameters_of,
    parameters_of,
    plain_dict,
    tables_of,
)
from lightning_recorder.internals.storage import is_uninitialized
from lightning_recorder.module_names import named_submodules

__all__ = ["FUSED", "ModelNames", "count", "count_below", "count_own", "is_fused", "is_opaque", "note_used"]


def count(parameters: Iterable[Tensor]) -> int:
    """Return the number of elements, without uninitialized parameters."""
    return sum(each.numel() for each in parameters if is_initialized(each))


def is_initialized(parameter: Tensor) -> bool:
    """Return False for a lazy parameter that has no shape yet."""
    return type(parameter) is nn.Parameter or not is_uninitialized(parameter)


def own_parameters(module: nn.Module) -> list[Tensor]:
    """Return the module's own parameters, even if its class overrides ``parameters``."""
    if is_scripted(module):
        return list(own_parameters_of(module).values())
    return [each for each in tables_of(module)[0].values() if each is not None]


def count_own(module: nn.Module) -> int:
    """Return the number of elements of a module's own parameters."""
    return count(own_parameters(module))


def count_below(module: nn.Module) -> int:
    """Return the number of elements of the parameters of a module and its submodules, each parameter once."""
    found = {id(each): each for inner in modules_of(module) for each in own_parameters(inner)}
    return count(found.values())


def note_used(builder: GraphBuilder, registered: Set[str], unobserved: Set[int]) -> None:
    """Set the number of used parameters of each module call.

    A parameter is used if any edge leaves it, wherever that edge leads. It belongs to every module in whose name its
    own name, or one of its other names, begins.

    The numbers of ``unobserved`` calls, which have a computation that was not observed, and of the calls around them
    stay unknown.
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
    """Return the number of elements of some parameters below each module.

    The layers in a Python list do not count for the module that has the list, which does not register them.
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


# In eval mode these modules compute everything in one fused function, unless a function mode is active. Then they take
# another path, whose results differ in the last bits and in padded rows. So the mode is removed while one of them runs.
FUSED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


class _NamedModule(weakref.ref[nn.Module]):
    """A weak reference to a module with its name and the number of its own submodules and parameters."""

    __slots__ = ("name", "size")
    name: str
    size: int


class _NamedTensor(weakref.ref[Tensor]):
    """A weak reference to a parameter or buffer with its kind, its name, and the id of the module that owns it."""

    __slots__ = ("known",)
    known: tuple[Kind, str, int]


class ModelNames:
    """The names of the modules that a recording may observe, and of their parameters and buffers.

    Registered modules have their dotted names. A module in a plain list, tuple or dictionary is named by its location,
    such as ``blocks[0]``. A module that does not belong to the model is named by its class when it is called.
    """

    def __init__(self, registered: Mapping[str, nn.Module]) -> None:
        # Keyed by id. Ids are reused after a module or tensor is freed, so a weak reference is kept with each.
        self._names: dict[int, _NamedModule] = {}
        self._tensors: dict[int, _NamedTensor] = {}
        self._aliases: dict[int, tuple[str, ...]] = {}
        self._counts: dict[str, int] = {}
        for name, each in registered.items():
            self._introduce(name, each)
        self._registered = list(self._names.values())
        self._own = list(self._tensors.values())
        for name, each in list(_in_plain_containers(registered)):
            if self.of(each) is None:
                self._welcome(name, each)

    def of(self, module: nn.Module) -> str | None:
        """Return the name of a module, or None if it has none."""
        reference = self._names.get(id(module))
        return reference.name if reference is not None and reference() is module else None

    def module(self, key: int) -> nn.Module | None:
        """Return the module with an id; ``None`` if it is unknown or does not live any more."""
        reference = self._names.get(key)
        return None if reference is None else reference()

    def of_stranger(self, module: nn.Module) -> str | None:
        """Give a name to a called module that has none, and return it; ``None`` if it must stay unnamed."""
        # A wrapper needs no name beside the module that it wraps. TorchScript returns new submodule objects each time.
        wraps = any(each is not module and self.of(each) is not None for each in modules_of(module))
        if is_scripted(module) or wraps:
            return None
        self._welcome(type(module).__name__, module)
        return self.of(module)

    def tensor(self, tensor: Tensor) -> tuple[Kind, str, int] | None:
        """Return the kind of a parameter or buffer, its name, and the id of the module that owns it."""
        reference = self._tensors.get(id(tensor))
        return reference.known if reference is not None and reference() is tensor else None

    def references(self) -> dict[str, weakref.ref[nn.Module]]:
        """Return weak references to the modules by name."""
        return {reference.name: reference for reference in self._names.values()}

    def aliases(self, tensor: Tensor) -> tuple[str, ...]:
        """Return the other names of a parameter or buffer that several modules register."""
        return self._aliases.get(id(tensor), ()) if self._aliases and self.tensor(tensor) is not None else ()

    def trained(self) -> dict[str, bool]:
        """Return the name of each parameter of the model, and True if it requires a gradient.

        A shared parameter has its first name. Uninitialized ones are left out.
        """
        return {name: each.requires_grad for name, each in self._parameters()}

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        for reference in self._own:
            kind, name, _ = reference.known
            if kind == "parameter" and (tensor := reference()) is not None and is_initialized(tensor):
                yield name, tensor

    def parameter_counts(self) -> dict[int, tuple[int, int]]:
        """Return the numbers of elements of the own parameters of each registered module, and of all below it, by id.

        The result is empty if a parameter or a module has several places in the model, or if the model has changed.
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
        for reference in reversed(self._registered):  # the inner ones come first
            name = reference.name
            if name and (number := below.get(name)):
                around = name.rpartition(".")[0]
                below[around] = below.get(around, 0) + number
        registered = islice(self._names.items(), len(self._registered))  # the names of further modules come after them
        return {key: (own.get(each.name, 0), below.get(each.name, 0)) for key, each in registered}

    def registered(self) -> set[str]:
        """Return the names of the registered modules."""
        return {reference.name for reference in self._registered}

    def _introduce(self, name: str, module: nn.Module) -> None:
        """Register a module and its own tensors under their names."""
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
        """Register a module that the model does not register, and its submodules, under a unique name."""
        unique = name
        while unique in self._counts:
            self._counts[name] += 1
            unique = f"{name}#{self._counts[name]}"
        for path, each in named_submodules(module).items():
            if self.of(each) is None:
                self._introduce(f"{unique}.{path}" if path else unique, each)


def _in_plain_containers(registered: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in lists, tuples and dictionaries among the attributes of registered modules."""
    for name, module in registered.items():
        if issubclass(type(module), torch.jit.ScriptModule):
            continue
        attributes = attributes_of(module)
        if not any(issubclass(type(attributes[each]), _CONTAINERS) for each in attributes.keys() - _OWN):
            continue  # the usual case
        for attribute, value in attributes.items():
            if attribute in _OWN or not is_a(value, _CONTAINERS) or attribute in nn.Module.__dict__:
                continue
            for suffix, each in _modules_in(value):
                yield f"{name}.{attribute}{suffix}".removeprefix("."), each


# The attributes in which a module keeps its registered objects, including hooks.
_OWN = frozenset(vars(nn.Module()))


_CONTAINERS = (list, tuple, dict)

# A longer container holds data of a model rather than layers.
_MOST_NESTED = 1000


def _modules_in(value: object, *, nested: bool = True) -> Iterator[tuple[str, nn.Module]]:
    pairs = _pairs(value)
    nested = nested and len(pairs) <= _MOST_NESTED
    for key, each in pairs:
        if is_a(each, nn.Module):
            yield f"[{key!r}]", each
        elif nested and is_a(each, _CONTAINERS) and len(_pairs(each)) <= _MOST_NESTED:
            yield from ((f"[{key!r}]{suffix}", module) for suffix, module in _modules_in(each, nested=False))


def _pairs(value: object) -> list[tuple[object, Any]]:
    """Return the indices or keys of a container with its entries, read without the methods of its class."""
    if is_a(value, dict):
        return list(plain_dict(value).items())
    if is_a(value, list):
        return list(enumerate(list.__iter__(value)))
    return list(enumerate(tuple.__iter__(value))) if is_a(value, tuple) else []


def is_fused(module: nn.Module) -> bool:
    """Return True if a module may compute everything in one fused function, as torch does without gradients only."""
    if not issubclass(type(module), FUSED) or is_training(module):
        return False
    return not (torch.is_grad_enabled() and any(each.requires_grad for each in parameters_of(module)))


def is_opaque(module: nn.Module) -> bool:
    """Return True if the computation inside a module is not observed at all."""
    return is_fused(module) or is_scripted(module)
