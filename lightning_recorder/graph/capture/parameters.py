"""The numbers of parameters of modules, and how many of them a recording used."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set

from torch import Tensor, nn

from lightning_recorder.graph.capture.builder import Draft, GraphBuilder
from lightning_recorder.internals.module_tree import is_scripted, modules_of, own_parameters_of, table_of
from lightning_recorder.internals.storage import is_uninitialized

__all__ = ["around", "count", "count_below", "count_own", "is_initialized", "note_used"]


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
    return [each for each in table_of(module, "_parameters").values() if each is not None]


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

    Args:
        builder: All nodes of the recording, and the edges.
        registered: The names of the model's parameters.
        unobserved: The calls with a computation that was not observed; their numbers and those of the calls around
            them stay unknown.
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
