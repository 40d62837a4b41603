"""Which modules to record, said as data and resolved against ``named_modules()``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import nn

from lightning_recorder.errors import ArgumentError, SelectionError

__all__ = ["Selection", "leaf_modules", "named_submodules"]

# Parts of a name that torch puts in when it wraps a module in another: by torch.compile, FSDP, checkpoint_wrapper.
_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

# Modules that read the parameters of their children without calling them: to a hook they are leaves.
_OPAQUE = (nn.MultiheadAttention,)


@dataclass(frozen=True)
class Selection:
    """A choice of submodules by name, by type and by exclusion; what is given must hold together.

    A name is the dotted name of ``named_modules()``. In a name ``*`` stands for any run of characters within one
    segment, ``?`` for one character, and a segment ``**`` for any number of segments, none included: ``encoder.*`` are
    the children of ``encoder``, ``encoder.**`` is ``encoder`` with everything below it, ``**.attn`` is every module
    called ``attn``. A selected ``ModuleList`` or ``ModuleDict`` stands for its entries, because it is never called
    itself. Without names and types the selection is the leaves of the tree.

    Args:
        names: Names or globs; a module is chosen when any of them matches.
        types: Classes, or class names as ``"Linear"`` or ``"torch.nn.Linear"``; base classes count.
        exclude: Names or globs of modules to leave out. A pattern here may match nothing.

    Raises:
        ArgumentError: If an entry of ``names`` or ``exclude`` is no string, or one of ``types`` neither a class nor a
            string.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        >>> list(Selection().resolve(net))
        ['0', '1.0', '1.1']
        >>> list(Selection("**", types="Linear", exclude="0").resolve(net))
        ['1.0']
        >>> Selection("1.2").resolve(net)
        Traceback (most recent call last):
            ...
        lightning_recorder.errors.SelectionError: no module matches '1.2'; the closest names are '1.1', '1.0', '1'
    """

    names: str | Iterable[str] | None = None
    types: type[nn.Module] | str | Iterable[type[nn.Module] | str] | None = None
    exclude: str | Iterable[str] | None = None

    def __post_init__(self) -> None:
        # Normalised once, so that equal selections compare equal.
        for field in ("names", "types", "exclude"):
            object.__setattr__(self, field, _entries(field, getattr(self, field)))

    def resolve(self, module: nn.Module) -> dict[str, nn.Module]:
        """The selected submodules by name, in the order of ``named_modules()``.

        A module that is registered under several names appears once, under the first of them that is selected.

        Raises:
            SelectionError: If nothing is selected, or a single name or glob matches nothing; the message gives the
                closest names.
        """
        chosen = self._of_types(module, self._named(module))
        excluded = [str(pattern) for pattern in self.exclude or ()]
        left = {name: each for name, each in chosen.items() if not any(_matches(name, pattern) for pattern in excluded)}
        if chosen and not left:
            raise SelectionError(f"exclude={excluded} leaves none of the {len(chosen)} selected modules")
        return left

    def _named(self, module: nn.Module) -> dict[str, nn.Module]:
        """The modules with the names, or without names all that could be meant."""
        modules = named_submodules(module, remove_duplicate=self.names is None)
        if self.names is None:
            leaves = leaf_modules(module) if self.types is None else modules
            return {name: modules[name] for name in leaves if name and not _is_never_called(modules[name])}
        found: set[str] = set()
        for pattern in self.names:
            matched = {name for name in modules if _matches(name, pattern)}
            if not matched:
                raise SelectionError(f"no module matches {pattern!r}; {_closest(pattern, modules)}")
            found |= matched
        for name, each in modules.items():
            if name in found and _is_never_called(each):
                found |= {f"{name}.{child}" for child, _ in each.named_children()}
        first_names: dict[nn.Module, str] = {}
        for name, each in modules.items():
            if name in found and not _is_never_called(each):
                first_names.setdefault(each, name)
        return {name: each for each, name in first_names.items()}

    def _of_types(self, module: nn.Module, chosen: dict[str, nn.Module]) -> dict[str, nn.Module]:
        kinds = _entries("types", self.types)
        if kinds is None:
            return chosen
        left = {name: each for name, each in chosen.items() if any(_is_a(each, kind) for kind in kinds)}
        if not left:
            wanted = ", ".join(kind if isinstance(kind, str) else kind.__name__ for kind in kinds)
            present = sorted({type(each).__name__ for each in module.modules()})
            raise SelectionError(f"no selected module is a {wanted}; the model has {', '.join(present)}")
        return left


def _entries(field: str, value: object) -> tuple[Any, ...] | None:
    """The entries of a field that takes one or several, each checked."""
    if value is None:
        return None
    entries = tuple(value) if isinstance(value, Iterable) and not isinstance(value, (str, type)) else (value,)
    for entry in entries:
        if field == "types" and isinstance(entry, type) and issubclass(entry, nn.Module):
            continue
        if not isinstance(entry, str):
            expected = "subclasses of torch.nn.Module or their names" if field == "types" else "module names or globs"
            raise ArgumentError(f"{field} takes {expected}, got {entry!r}")
    if not entries and field != "exclude":
        raise ArgumentError(f"{field} is empty; leave it out to record what is recorded by default")
    return entries or None


def leaf_modules(module: nn.Module) -> list[str]:
    """Names of the submodules that call no other module, in the order of ``named_modules()``.

    ``nn.MultiheadAttention`` counts as a leaf: it uses its projection's weight and never calls the projection. So does
    a module whose only children make its parameters, by ``torch.nn.utils.parametrize``. The root is left out: who calls
    it, and with what, depends on the trainer's strategy.

    Example:
        >>> leaf_modules(nn.Sequential(nn.MultiheadAttention(4, 2), nn.ModuleList([nn.ReLU()])))
        ['0', '1.0']
    """
    names: list[str] = []
    opaque: list[str] = []
    for name, each in named_submodules(module).items():
        if not name or _is_never_called(each) or any(name.startswith(prefix) for prefix in opaque):
            continue
        if isinstance(each, _OPAQUE):
            opaque.append(name + ".")
        elif any(child != "parametrizations" for child, _ in each.named_children()):
            continue
        names.append(name)
    return names


def named_submodules(module: nn.Module, *, remove_duplicate: bool = True) -> dict[str, nn.Module]:
    """The modules of ``named_modules()``, the root included, by the names that they have in the user's code.

    What ``torch.compile``, FSDP and ``checkpoint_wrapper`` put into the names is left out, and of a wrapper and what it
    wraps, which then share a name, what it wraps is taken: hooks on both would see each call twice.

    Example:
        >>> import torch
        >>> net = nn.Sequential(torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager"))
        >>> [(name, type(each).__name__) for name, each in named_submodules(net).items()]
        [('', 'Sequential'), ('0', 'Sequential'), ('0.0', 'Linear')]
    """
    return {
        ".".join(part for part in name.split(".") if part not in _WRAPPED): each
        for name, each in module.named_modules(remove_duplicate=remove_duplicate)
    }


def _is_a(module: nn.Module, kind: type[nn.Module] | str) -> bool:
    if isinstance(kind, type):
        return isinstance(module, kind)
    # By the name of every base, so that FSDP's ``FSDPLinear`` is still a ``Linear``.
    return any(
        kind in (base.__name__, f"{base.__module__}.{base.__qualname__}", _public_name(base))
        for base in type(module).__mro__
    )


def _public_name(kind: type) -> str:
    """``torch.nn.Linear`` rather than ``torch.nn.modules.linear.Linear``: the name that people write."""
    package = "torch.nn" if kind.__module__.startswith("torch.nn.modules") else kind.__module__
    return f"{package}.{kind.__qualname__}"


def _is_never_called(module: nn.Module) -> bool:
    """Whether the module is one of torch's lists and dictionaries: whoever selects one means its entries.

    A subclass with a ``forward`` of its own is a module like any other.
    """
    containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    return isinstance(module, containers) and type(module).forward is nn.Module.forward


def _matches(name: str, pattern: str) -> bool:
    # The root has no name, so that no glob means it.
    return name == pattern or (name != "" and _compiled(pattern).fullmatch(name) is not None)


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    """The glob as a regular expression.

    Example:
        >>> [bool(_compiled(glob).fullmatch("a.b.c")) for glob in ("**.c", "a.*", "a.**", "a.*.c", "a.**.b.c", "*")]
        [True, False, True, True, True, False]
    """
    expression = ""
    segments: list[str] = []
    for segment in pattern.split("."):
        # Two neighbouring ** are one.
        if segment != "**" or segments[-1:] != ["**"]:
            segments.append(segment)
    for position, segment in enumerate(segments):
        last = position == len(segments) - 1
        if segment != "**":
            expression += "".join({"*": "[^.]*", "?": "[^.]"}.get(char, re.escape(char)) for char in segment)
            expression += "" if last else r"\."
        elif last and position:
            # ``a.**`` also matches ``a``: the dot before belongs to what may be absent.
            expression = expression.removesuffix(r"\.") + r"(?:\.[^.]+)*"
        else:
            expression += r"(?:[^.]+\.)*" + ("[^.]+" if last else "")
    return re.compile(expression)


def _closest(pattern: str, names: Iterable[str]) -> str:
    known = [name for name in names if name]
    # Most mistakes are in one segment, so names with an equal parent or an equal last segment come before what merely
    # looks alike.
    near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.5)
    tail, head = pattern.rpartition(".")[2], pattern.partition(".")[0]
    related = [name for name in known if name.rpartition(".")[2] == tail or name.partition(".")[0] == head]
    closest = list(dict.fromkeys([*near, *related, *known]))[:3]
    if not closest:
        return "the model has no submodules"
    return "the closest names are " + ", ".join(map(repr, closest))
