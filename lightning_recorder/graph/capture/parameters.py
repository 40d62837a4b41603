"""The numbers of parameters of modules, and how many of them a recording used."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence, Set

import torch
from torch import Tensor, nn

from lightning_recorder.graph.capture.builder import Draft
from lightning_recorder.internals.storage import is_uninitialized

__all__ = ["ParameterCounts", "count", "note_used", "own_parameters"]


def count(parameters: Iterable[Tensor]) -> int:
    """Return the number of elements, without uninitialized parameters."""
    # A lazy parameter has a class of its own. This runs for each module of a recording.
    return sum([each.numel() for each in parameters if type(each) is nn.Parameter or not is_uninitialized(each)])


def own_parameters(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the module's own parameters with their names, even if its class overrides ``named_parameters``."""
    if isinstance(module, torch.jit.ScriptModule):
        return list(module.named_parameters(recurse=False))
    own = module._parameters
    return [(name, each) for name, each in own.items() if each is not None] if own else []


class ParameterCounts:
    """The numbers of parameters below modules, each of which is counted at the end of its first call.

    At that time its lazy submodules are initialized.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[nn.Module], dict[int, int]]] = {}
        """For each module the numbers of elements of all parameters below it, by the id of the parameter."""

    def of(self, module: nn.Module) -> int:
        """Return the number of elements of the parameters of a module and its submodules, each parameter once."""
        known = self._known.get(id(module))
        if known is None or known[0]() is not module:
            known = self._known[id(module)] = weakref.ref(module), self._below(module, set())
        return sum(known[1].values())

    def now(self, module: nn.Module) -> int:
        """Return the present number for a module whose call has not ended."""
        self._known.pop(id(module), None)
        return sum(self._below(module, set()).values())

    def _below(self, module: nn.Module, around: set[int]) -> dict[int, int]:
        around.add(id(module))  # a module may contain itself
        found = {
            id(each): each.numel()
            for _, each in own_parameters(module)
            if type(each) is nn.Parameter or not is_uninitialized(each)
        }
        for inner in module._modules.values():
            if inner is not None and id(inner) not in around:
                known = self._known.get(id(inner))
                found |= self._below(inner, around) if known is None or known[0]() is not inner else known[1]
        return found


def note_used(nodes: Sequence[Draft], sources: Iterable[int], unobserved: Set[int]) -> None:
    """Set the number of used parameters of each module call.

    A parameter is used if any edge leaves it, wherever that edge leads. It belongs to every module in whose name its
    own name, or one of its other names, begins.

    Args:
        nodes: All nodes of the recording.
        sources: The nodes that edges leave.
        unobserved: The calls with a computation that was not observed; their numbers and those of the calls around
            them stay unknown.
    """
    used = {node.name: node for node in map(nodes.__getitem__, sources) if node.kind == "parameter"}
    own: dict[tuple[str, ...], int] = {}  # the numbers for each module, or for each group of modules that share some
    sizes: dict[tuple[int, ...], int] = {}
    for name, node in used.items():
        owners = (name.rpartition(".")[0], *[each.rpartition(".")[0] for each in node.tied])
        for meta in node.outputs:
            if meta.shape not in sizes:
                sizes[meta.shape] = math.prod(meta.shape)
            own[owners] = own.get(owners, 0) + sizes[meta.shape]
    below: dict[str, int] = {}
    for owners, number in own.items():
        for each in _around(owners[0]) if len(owners) == 1 else {name for owner in owners for name in _around(owner)}:
            below[each] = below.get(each, 0) + number
    unknown = set(unobserved)
    for number in unobserved:
        while (parent := nodes[number].parent) is not None:
            unknown.add(number := parent)
    for number, node in enumerate(nodes) if not nodes[0].failed else ():
        if node.kind == "module" and number not in unknown:
            node.used_parameters = min(below.get(node.name, 0), node.total_parameters)


def _around(module: str) -> list[str]:
    """Return the names of a module and of those around it, from the innermost to the root."""
    parts = module.split(".") if module else []
    return [".".join(parts[:end]) for end in range(len(parts), -1, -1)]
