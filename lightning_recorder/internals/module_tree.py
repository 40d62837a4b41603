"""The modules, parameters and buffers of a model, read without running its code.

A class may override ``named_modules``, ``parameters``, ``__getattr__``, ``__hash__`` or a property. Such code may draw
random numbers, change buffers or raise, and a recorder must not cause that. The functions in this file read the tables
that ``nn.Module`` keeps in the instance, without calling methods of the tables, whose class may be a user's. A
metaclass may have such code, too, so the name and the bases of a class are read as ``type`` stores them. Only methods
of TorchScript modules are called, because these modules have no such tables.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSet
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.jit._trace import TopLevelTracedModule
from typing_extensions import TypeIs

__all__ = [
    "ModuleMap",
    "ModuleSet",
    "attributes_of",
    "bases_of",
    "buffers_of",
    "children_of",
    "class_attribute",
    "class_name",
    "hookable",
    "is_a",
    "is_scripted",
    "is_training",
    "modules_of",
    "named_buffers_of",
    "named_modules_of",
    "named_parameters_of",
    "own_buffers_of",
    "own_parameters_of",
    "package_of",
    "parameters_of",
    "plain_dict",
    "put_entry",
    "stored_attribute",
    "table_of",
    "tables_of",
    "takes_hooks",
]


Value = TypeVar("Value")


def _table(module: nn.Module, name: str) -> Iterable[tuple[str, Any]]:
    """Return the entries of a table of a module; empty if its class has not called ``nn.Module.__init__``."""
    if is_scripted(module):
        own: Any = {
            "_parameters": lambda: module.named_parameters(recurse=False),
            "_buffers": lambda: module.named_buffers(recurse=False),
            "_modules": module.named_children,
        }[name]()
        return list(own)
    return list(table_of(module, name).items())


def table_of(module: nn.Module, name: str) -> dict[str, Any]:
    """Return ``_parameters``, ``_buffers`` or ``_modules`` of a module; empty if the module has no such table.

    The result is read-only: a table whose class is not ``dict`` is copied, without calling methods of its class.
    """
    return plain_dict(_get(module, "__dict__").get(name))


def tables_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return ``_parameters``, ``_buffers`` and ``_modules`` of a module, like :func:`table_of`."""
    stored = _get(module, "__dict__")
    try:
        parameters, buffers, modules = stored["_parameters"], stored["_buffers"], stored["_modules"]
    except KeyError:
        parameters, buffers, modules = map(stored.get, ("_parameters", "_buffers", "_modules"))
    if type(parameters) is type(buffers) is type(modules) is dict:
        return parameters, buffers, modules
    return plain_dict(parameters), plain_dict(buffers), plain_dict(modules)


def plain_dict(table: Any) -> dict[Any, Any]:
    """Return a plain dict with the entries, read without calling methods of a subclass; empty if not a dictionary."""
    kind: type = type(table)
    if kind is dict:
        found: dict[Any, Any] = table
        return found
    if issubclass(kind, OrderedDict):  # its order is separate from that of dict
        return {key: dict.__getitem__(table, key) for key in OrderedDict.__iter__(table)}
    return dict(dict.items(table)) if issubclass(kind, dict) else {}


def put_entry(table: dict[Any, Any], key: Any, value: Any) -> None:
    """Set an entry of a dictionary without calling methods of a subclass."""
    (OrderedDict if issubclass(type(table), OrderedDict) else dict).__setitem__(table, key, value)


def attributes_of(owner: object) -> dict[str, Any]:
    """Return the attributes of an instance, even if its class overrides ``__dict__`` or ``__getattribute__``."""
    found: dict[str, Any] = _get(owner, "__dict__")
    return found


_get: Any = object.__getattribute__
_put: Any = object.__setattr__
_MISSING = object()


# Two overloads, because type checkers would join the classes of a tuple to ``object``.
@overload
def is_a(value: object, kinds: type[Value]) -> TypeIs[Value]: ...
@overload
def is_a(value: object, kinds: tuple[type, ...]) -> bool: ...
def is_a(value: object, kinds: Any) -> bool:
    """Return True if the class of a value is one of the given classes or a subclass.

    Unlike ``isinstance``, this does not read ``__class__`` from the value, which would call ``__getattribute__``.
    """
    return issubclass(type(value), kinds)


def is_scripted(module: object) -> bool:
    """Return True for a TorchScript module."""
    return issubclass(type(module), torch.jit.ScriptModule)


def takes_hooks(module: object) -> bool:
    """Return False for a TorchScript module, except for the root of a trace, whose call begins in Python."""
    return not is_scripted(module) or issubclass(type(module), TopLevelTracedModule)


def is_training(module: nn.Module) -> bool:
    """Return True if a module is in training mode."""
    return bool(stored_attribute(module, "training", True))


def hookable(module: nn.Module) -> nn.Module:
    """Return an ``nn.Module`` with the same attributes, so that no method of the module's class is called.

    Hooks registered on the result are hooks of the original module.
    """
    if is_scripted(module):
        return module
    bare: nn.Module = object.__new__(nn.Module)
    _put(bare, "__dict__", attributes_of(module))
    return bare


def children_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and modules of ``named_children()``, each module once."""
    seen: set[int] = set()
    for name, child in _table(module, "_modules"):
        if child is not None and id(child) not in seen:
            seen.add(id(child))
            yield name, child


def named_modules_of(
    module: nn.Module, prefix: str = "", *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the same as ``nn.Module.named_modules()``, in the same order."""
    found: list[tuple[str, nn.Module]] = []
    _collect(module, prefix, set() if remove_duplicate else None, found)
    return iter(found)


def _collect(module: nn.Module, name: str, seen: set[int] | None, found: list[tuple[str, nn.Module]]) -> None:
    if seen is not None:
        key = id(module)
        if key in seen:
            return
        seen.add(key)
    found.append((name, module))
    # :func:`_table` inlined, to save calls.
    children = _get(module, "__dict__").get("_modules")
    is_plain = type(children) is dict  # a traced module has no tables
    if not is_plain or children:
        for part, child in children.items() if is_plain else _table(module, "_modules"):
            if child is not None:
                _collect(child, f"{name}.{part}" if name else part, seen, found)


def modules_of(module: nn.Module) -> list[nn.Module]:
    """Return the modules of ``modules()``, beginning with the module itself."""
    return [each for _, each in named_modules_of(module)]


def _named_tensors(module: nn.Module, table: str, prefix: str, recurse: bool) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    modules = named_modules_of(module, prefix) if recurse else [(prefix, module)]
    for around, each in modules:
        for name, tensor in _table(each, table):
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            yield f"{around}.{name}" if around else name, tensor


def named_parameters_of(
    module: nn.Module, prefix: str = "", *, recurse: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the same as ``nn.Module.named_parameters()``."""
    return _named_tensors(module, "_parameters", prefix, recurse)


def parameters_of(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a module and its submodules, each once."""
    return [each for _, each in named_parameters_of(module)]


def own_parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are registered on a module itself, each once."""
    return dict(named_parameters_of(module, recurse=False))


def named_buffers_of(module: nn.Module, *, recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield the same as ``nn.Module.named_buffers()``."""
    return _named_tensors(module, "_buffers", "", recurse)


def buffers_of(module: nn.Module) -> list[Tensor]:
    """Return the buffers of a module and its submodules, each once."""
    return [each for _, each in named_buffers_of(module)]


def own_buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are registered on a module itself, each once."""
    return dict(named_buffers_of(module, recurse=False))


def stored_attribute(owner: object, name: str, default: Any = None) -> Any:
    """Return a stored attribute of an object or its class, without evaluating properties or ``__getattr__``."""
    if is_scripted(owner):
        return getattr(owner, name, default)
    try:
        attributes = attributes_of(owner)
    except AttributeError:  # an object with slots
        attributes = {}
    if name in attributes:
        return attributes[name]
    for table in ("_parameters", "_buffers", "_modules") if is_a(owner, nn.Module) else ():
        if name in (found := plain_dict(attributes.get(table))):
            return found[name]
    found = class_attribute(type(owner), name, _MISSING)
    # A value with a ``__get__``, such as a property, would run code.
    return default if found is _MISSING or hasattr(type(found), "__get__") else found


# These are the getters of ``type`` themselves. A capture calls them for each module, so a wrapper would cost time.
class_name: Callable[[type], str] = vars(type)["__name__"].__get__
"""Return ``__name__`` of a class."""

bases_of: Callable[[type], tuple[type, ...]] = vars(type)["__mro__"].__get__
"""Return ``__mro__`` of a class, which begins with the class itself."""


def package_of(kind: type) -> str:
    """Return the top-level package in which a class is defined, such as ``"torch"``."""
    return str(_MODULE(kind)).partition(".")[0]


def class_attribute(kind: type, name: str, default: Any = None) -> Any:
    """Return an attribute as stored in the first class of the MRO that has it, such as a function or a property."""
    for each in bases_of(kind):
        stored = _DICT(each)
        if name in stored:
            return stored[name]
    return default


_MODULE, _DICT = (vars(type)[name].__get__ for name in ("__module__", "__dict__"))


class ModuleMap(MutableMapping[nn.Module, Value]):
    """A dictionary whose keys are modules by identity, since a class may define ``__eq__`` and ``__hash__``."""

    def __init__(self) -> None:
        self._items: dict[int, tuple[nn.Module, Value]] = {}

    def __getitem__(self, module: nn.Module) -> Value:
        return self._items[id(module)][1]

    def __setitem__(self, module: nn.Module, value: Value) -> None:
        self._items[id(module)] = module, value

    def __delitem__(self, module: nn.Module) -> None:
        del self._items[id(module)]

    def __iter__(self) -> Iterator[nn.Module]:
        return (module for module, _ in self._items.values())

    def __len__(self) -> int:
        return len(self._items)


class ModuleSet(MutableSet[nn.Module]):
    """A set of modules by identity, since a class may define ``__eq__`` and ``__hash__``."""

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self._modules = {id(each): each for each in modules}

    def __contains__(self, module: object) -> bool:
        return id(module) in self._modules

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules.values())

    def __len__(self) -> int:
        return len(self._modules)

    def add(self, value: nn.Module) -> None:
        """Add a module."""
        self._modules[id(value)] = value

    def discard(self, value: nn.Module) -> None:
        """Remove a module, if it is in the set."""
        self._modules.pop(id(value), None)

    def update(self, modules: Iterable[nn.Module]) -> None:
        """Add several modules."""
        self._modules.update((id(each), each) for each in modules)
