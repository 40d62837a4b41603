"""The names of the modules and parameters of a model, as in the user's code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from lightning_recorder.internals.module_tree import (
    ModuleMap,
    attributes_of,
    bases_of,
    children_of,
    class_attribute,
    class_name,
    is_a,
    named_modules_of,
    named_parameters_of,
    package_of,
    plain_dict,
    tables_of,
)

__all__ = [
    "default_modules",
    "is_metric",
    "is_never_called",
    "modules_in_containers",
    "named_submodules",
    "own_parameters",
    "without_wrappers",
]

# Segments that torch.compile, FSDP and checkpoint_wrapper insert into the names of wrapped modules.
_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

# Modules that use the parameters of their children without calling the children. For hooks, these modules are leaves.
_OPAQUE = (nn.MultiheadAttention,)


def named_submodules(
    module: nn.Module, *, remove_duplicate: bool = True, with_lent: bool = False
) -> dict[str, nn.Module]:
    """Return the modules of ``named_modules()``, including the root, by their names in the user's code.

    ``with_lent`` adds unregistered modules whose parameters are registered on another module. For example, a Keras
    model has its layers in a list, and registers their parameters itself. Such modules are named by their position, as
    in ``model._layers[1]``.

    Name segments inserted by ``torch.compile``, FSDP and ``checkpoint_wrapper`` are removed. A wrapper and its wrapped
    module then share a name. Only the wrapped module is returned, since hooks on both would fire twice for each call.

    Example:
        >>> import torch
        >>> net = nn.Sequential(torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager"))
        >>> [(name, type(each).__name__) for name, each in named_submodules(net).items()]
        [('', 'Sequential'), ('0', 'Sequential'), ('0.0', 'Linear')]
    """
    found = without_wrappers(dict(named_modules_of(module, remove_duplicate=remove_duplicate)))
    return found | _lent_modules(found) if with_lent else found


def without_wrappers(found: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Convert the result of ``named_modules()`` to that of :func:`named_submodules`."""
    # Search in the joined names, which takes a fraction of the time of a search in each name.
    joined = "".join(found)
    if not any(segment in joined for segment in _WRAPPED):
        return found
    return {".".join([part for part in name.split(".") if part not in _WRAPPED]): each for name, each in found.items()}


def default_modules(module: nn.Module) -> list[str]:
    """Return the names of the submodules to record by default: leaves, and every module that owns parameters.

    A leaf calls no other module. ``nn.MultiheadAttention`` counts as a leaf, since it uses the weight of its projection
    but never calls the projection. A module whose only children are parametrizations (``torch.nn.utils.parametrize``)
    also counts as a leaf. A module owns the parameters that :func:`own_parameters` yields.

    Metrics of torchmetrics are excluded together with everything below them. The root is excluded even if it owns
    parameters, since under DDP a call of a LightningModule is its ``training_step`` and its output is the loss.

    Example:
        >>> block = nn.Sequential(nn.MultiheadAttention(4, 2), nn.ModuleList([nn.ReLU()]))
        >>> default_modules(nn.ModuleDict({"block": block}))
        ['block.0', 'block.1.0']
        >>> block.register_parameter("gain", nn.Parameter())
        >>> default_modules(nn.ModuleDict({"block": block}))
        ['block', 'block.0', 'block.1.0']
    """
    found: ModuleMap[str] = ModuleMap()
    closed: list[str] = []  # modules below which nothing is recorded
    for name, each in named_submodules(module, remove_duplicate=False, with_lent=True).items():
        if not name or each in found or is_never_called(each) or any(name.startswith(prefix) for prefix in closed):
            continue
        if is_metric(each):
            closed.append(name + ".")
            continue
        if is_a(each, _OPAQUE):
            closed.append(name + ".")
        elif any(child != "parametrizations" for child, _ in children_of(each)) and not _owns_parameters(each):
            continue
        found[each] = name
    return list(found.values())


def own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that a call of the module uses itself, with their names in the module.

    These are the parameters registered on the module, the parameters in its parameter lists and dictionaries, and the
    parameters of children that it never calls: parametrizations and the projection of ``nn.MultiheadAttention``.

    Example:
        >>> [name for name, _ in own_parameters(nn.MultiheadAttention(4, 2))]
        ['in_proj_weight', 'in_proj_bias', 'out_proj.weight', 'out_proj.bias']
        >>> net = nn.Sequential(nn.Linear(1, 1))
        >>> net.scales = nn.ParameterList([nn.Parameter(), nn.Parameter()])
        >>> [name for name, _ in own_parameters(net)]
        ['scales.0', 'scales.1']
    """
    yield from named_parameters_of(module, recurse=False)
    for name, child in children_of(module):
        if name == "parametrizations" or is_a(module, _OPAQUE):
            yield from named_parameters_of(child, prefix=name)
        elif is_never_called(child):
            for path, parameter in own_parameters(child):
                yield f"{name}.{path}", parameter


def _owns_parameters(module: nn.Module) -> bool:
    # The original tensor of a parametrization belongs to the parametrized module.
    return not is_a(module, ParametrizationList) and any(True for _ in own_parameters(module))


def is_metric(module: nn.Module) -> bool:
    """Return True if the module is a torchmetrics metric; torchmetrics need not be installed."""
    for base in bases_of(type(module)):
        if class_name(base) in ("Metric", "MetricCollection") and package_of(base) == "torchmetrics":
            return True
    return False


def is_never_called(module: nn.Module) -> bool:
    """Return True for torch's module and parameter containers. Selecting a container selects its entries.

    A subclass with its own ``forward`` is an ordinary module.
    """
    containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    return is_a(module, containers) and class_attribute(type(module), "forward") is nn.Module.forward


def _lent_modules(registered: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the unregistered modules whose parameters are registered on another module.

    Modules without parameters in the same container are included. A container that also has other modules, such as a
    list that keeps a teacher network unregistered, is ignored.
    """
    known = {id(each) for each in registered.values()}
    lent: dict[str, nn.Module] = {}
    parameters: set[int] = set()
    around = registered
    while around:
        containers: dict[str, dict[str, nn.Module]] = {}
        for name, each in modules_in_containers(around):
            if id(each) not in known:
                containers.setdefault(name.rpartition("[")[0], {}).update(
                    (f"{name}.{path}" if path else name, inner) for path, inner in named_submodules(each).items()
                )
        if containers and not parameters:
            parameters = _own_parameters_of(registered.values())
        around = {}
        for modules in containers.values():
            own = _own_parameters_of(modules.values())
            if own and own <= parameters:
                around |= {name: each for name, each in modules.items() if id(each) not in known}
                known |= {id(each) for each in modules.values()}
        lent |= around
    return lent


def _own_parameters_of(modules: Iterable[nn.Module]) -> set[int]:
    """Return the ids of the parameters that are registered directly on the modules."""
    return {id(each) for module in modules for each in tables_of(module)[0].values() if each is not None}


def modules_in_containers(registered: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in lists, tuples and dictionaries among the attributes of registered modules."""
    for name, module in registered.items():
        if issubclass(type(module), torch.jit.ScriptModule):
            continue
        attributes = attributes_of(module)
        for attribute in attributes.keys() - _OWN:
            if issubclass(type(attributes[attribute]), _CONTAINERS):
                break
        else:
            continue  # the usual case: no other attributes
        for attribute, value in attributes.items():
            if attribute in _OWN or not is_a(value, _CONTAINERS) or attribute in nn.Module.__dict__:
                continue
            for suffix, each in _modules_in(value):
                yield f"{name}.{attribute}{suffix}".removeprefix("."), each


# The attributes that every module has, such as the tables of registered objects and hooks.
_OWN = frozenset(vars(nn.Module()))


_CONTAINERS = (list, tuple, dict)

# The maximum length of a container of modules. A longer container holds data rather than layers.
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
    """Return pairs of the index or key and the entry of a container, without calling methods of a subclass."""
    if is_a(value, dict):
        return list(plain_dict(value).items())
    if is_a(value, list):
        return list(enumerate(list.__iter__(value)))
    return list(enumerate(tuple.__iter__(value))) if is_a(value, tuple) else []
