"""The names of a model's modules and of the tensors that they own."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from lightning_recorder.graph.model import Kind
from lightning_recorder.names import named_submodules

__all__ = ["ModelNames"]


class ModelNames:
    """The names of the modules that a recording may observe, and of their parameters and buffers.

    Registered modules have their dotted names. A module in a plain list, tuple or dictionary is named by its location,
    such as ``blocks[0]``. A module that does not belong to the model is named by its class when it is called.

    Args:
        root: The model.
    """

    def __init__(self, root: nn.Module) -> None:
        # Keyed by id. Ids are reused after a module or tensor is freed, so a weak reference is kept with each.
        self._names: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._tensors: dict[int, tuple[weakref.ref[Tensor], tuple[Kind, str, int]]] = {}
        self._aliases: dict[int, tuple[str, ...]] = {}
        self._counts: dict[str, int] = {}
        for name, each in named_submodules(root).items():
            self._introduce(name, each)
        for name, each in list(_in_plain_containers(root)):
            if self.of(each) is None:
                self._welcome(name, each)

    def of(self, module: nn.Module) -> str | None:
        """Return the name of a module, or None if it has none."""
        reference, name = self._names.get(id(module), (None, None))
        return name if reference is not None and reference() is module else None

    def of_stranger(self, module: nn.Module) -> str | None:
        """Return a new name for a module without one that is called; ``None`` if it must stay without a name."""
        # A wrapper needs no name beside the module that it wraps. TorchScript returns new submodule objects each time.
        wraps = any(each is not module and self.of(each) is not None for each in module.modules())
        if isinstance(module, torch.jit.ScriptModule) or wraps:
            return None
        self._welcome(type(module).__name__, module)
        return self.of(module)

    def tensor(self, tensor: Tensor) -> tuple[Kind, str, int] | None:
        """Return the kind of a parameter or buffer, its name, and the id of the module that owns it."""
        reference, known = self._tensors.get(id(tensor), (None, None))
        return known if reference is not None and reference() is tensor else None

    def aliases(self, tensor: Tensor) -> tuple[str, ...]:
        """Return the other names of a parameter or buffer that several modules register."""
        return self._aliases.get(id(tensor), ()) if self.tensor(tensor) is not None else ()

    def clear(self) -> None:
        """Forget all modules and tensors."""
        self._names.clear()
        self._tensors.clear()
        self._aliases.clear()

    def _introduce(self, name: str, module: nn.Module) -> None:
        """Register a module and its own tensors under their names."""
        self._names[id(module)] = weakref.ref(module), name
        self._counts.setdefault(name, 1)
        own: list[tuple[Kind, Iterable[tuple[str, Tensor]]]] = [
            ("parameter", module.named_parameters(name, False)),
            ("buffer", module.named_buffers(name, False)),
        ]
        for kind, tensors in own:
            for path, tensor in tensors:
                if self.tensor(tensor) is None:
                    self._tensors[id(tensor)] = weakref.ref(tensor), (kind, path, id(module))
                    self._aliases.pop(id(tensor), None)
                else:
                    self._aliases[id(tensor)] = (*self._aliases.get(id(tensor), ()), path)

    def _welcome(self, name: str, module: nn.Module) -> None:
        """Register a module that the model does not register, and its submodules, under a unique name."""
        unique = name
        while unique in self._counts:
            self._counts[name] += 1
            unique = f"{name}#{self._counts[name]}"
        for path, each in named_submodules(module).items():
            if self.of(each) is None:
                self._introduce(f"{unique}.{path}" if path else unique, each)


def _in_plain_containers(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in lists, tuples and dictionaries among the attributes of registered modules."""
    for name, module in named_submodules(root).items():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        for attribute, value in vars(module).items():
            if attribute in nn.Module.__dict__ or attribute in _OWN:
                continue
            for suffix, each in _modules_in(value):
                yield f"{name}.{attribute}{suffix}".removeprefix("."), each


# The attributes in which a module keeps its registered objects, including hooks.
_OWN = frozenset(vars(nn.Module()))


# A longer container holds data of a model rather than layers.
_MOST_NESTED = 1000


def _modules_in(value: object, *, nested: bool = True) -> Iterator[tuple[str, nn.Module]]:
    pairs: Iterable[tuple[object, object]]
    if isinstance(value, (list, tuple)):
        pairs = enumerate(value)
    elif isinstance(value, dict):
        pairs = value.items()
    else:
        return
    nested = nested and len(value) <= _MOST_NESTED
    for key, each in pairs:
        if isinstance(each, nn.Module):
            yield f"[{key!r}]", each
        elif nested and isinstance(each, (list, tuple, dict)) and len(each) <= _MOST_NESTED:
            yield from ((f"[{key!r}]{suffix}", module) for suffix, module in _modules_in(each, nested=False))
