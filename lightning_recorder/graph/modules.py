"""What the modules of a model, and the tensors that they own, are called."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized

import torch
from torch import Tensor, nn

from lightning_recorder.graph.model import Kind
from lightning_recorder.names import named_submodules

__all__ = ["ModelNames"]


class ModelNames:
    """The names of the modules that a recording may meet, and of their parameters and buffers.

    Registered modules have their dotted names. What lies in a plain list, tuple or dictionary is called by the place,
    as ``blocks[0]``; what belongs to somebody else by its class, when it is called.

    Args:
        root: The model.
    """

    def __init__(self, root: nn.Module) -> None:
        self._names: dict[int, str] = {}
        self._strangers: list[nn.Module] = []  # kept, so that their ids stay theirs
        self._tensors: dict[int, tuple[Kind, str, nn.Module]] = {}
        for name, each in named_submodules(root).items():
            self._introduce(name, each)
        for name, each in list(_in_plain_containers(root)):
            if id(each) not in self._names:
                self._welcome(name, each)

    def of(self, module: nn.Module) -> str | None:
        """The name of a module, if it has one."""
        return self._names.get(id(module))

    def of_stranger(self, module: nn.Module) -> str | None:
        """A name for a module that has none and is called all the same; ``None`` for one that is not to have any."""
        # A wrapper has no name beside that of what it wraps; of TorchScript submodules each look gives other objects.
        inside = {id(each) for each in module.modules()} - {id(module)}
        if isinstance(module, torch.jit.ScriptModule) or inside & self._names.keys():
            return None
        self._welcome(type(module).__name__, module)
        return self._names[id(module)]

    def tensor(self, tensor: Tensor) -> tuple[Kind, str, nn.Module] | None:
        """Whether a tensor is a parameter or a buffer, its name, and the module that owns it."""
        return self._tensors.get(id(tensor))

    def clear(self) -> None:
        """Forget all of them."""
        self._names.clear()
        self._strangers.clear()
        self._tensors.clear()

    def _introduce(self, name: str, module: nn.Module) -> None:
        """Know a module and its own tensors by their names."""
        self._names[id(module)] = name
        for kind, tensors in (
            ("parameter", module.named_parameters(name, False)),
            ("buffer", module.named_buffers(name, False)),
        ):
            for path, tensor in tensors:
                self._tensors.setdefault(id(tensor), (kind, path, module))  # type: ignore[arg-type]  # a Kind

    def _welcome(self, name: str, module: nn.Module) -> None:
        """Know a module that is not registered, and its submodules, under a name that no other has."""
        taken = set(self._names.values())
        unique, number = name, 1
        while unique in taken:
            number += 1
            unique = f"{name}#{number}"
        self._strangers.append(module)
        for path, each in named_submodules(module).items():
            if id(each) not in self._names:
                self._introduce(f"{unique}.{path}" if path else unique, each)


def _in_plain_containers(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that lie in lists, tuples and dictionaries among the attributes of registered ones."""
    for name, module in named_submodules(root).items():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        for attribute, value in vars(module).items():
            if attribute in nn.Module.__dict__ or attribute in _OWN:
                continue
            for suffix, each in _modules_in(value):
                yield f"{name}.{attribute}{suffix}".removeprefix("."), each


# Where a module keeps what is registered, hooks among it.
_OWN = frozenset(vars(nn.Module()))


# What is longer holds the data of a model, not its layers.
_MOST_NESTED = 1000


def _modules_in(value: object, *, nested: bool = True) -> Iterator[tuple[str, nn.Module]]:
    pairs: Iterable[tuple[object, object]] = ()
    if isinstance(value, (list, tuple)):
        pairs = enumerate(value)
    elif isinstance(value, dict):
        pairs = value.items()
    nested = nested and isinstance(value, Sized) and len(value) <= _MOST_NESTED
    for key, each in pairs:
        if isinstance(each, nn.Module):
            yield f"[{key!r}]", each
        elif nested and isinstance(each, (list, tuple, dict)) and len(each) <= _MOST_NESTED:
            yield from ((f"[{key!r}]{suffix}", module) for suffix, module in _modules_in(each, nested=False))
