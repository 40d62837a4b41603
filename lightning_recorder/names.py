"""The names of a model's modules: as the user knows them, as globs match them, and those nearest to a wrong one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from torch import nn

__all__ = ["closest_names", "compile_glob", "is_never_called", "leaf_modules", "named_submodules"]

# Parts of a name that torch puts in when it wraps a module in another: by torch.compile, FSDP, checkpoint_wrapper.
_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

# Modules that read the parameters of their children without calling them: to a hook they are leaves.
_OPAQUE = (nn.MultiheadAttention,)


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
        if not name or is_never_called(each) or any(name.startswith(prefix) for prefix in opaque):
            continue
        if isinstance(each, _OPAQUE):
            opaque.append(name + ".")
        elif any(child != "parametrizations" for child, _ in each.named_children()):
            continue
        names.append(name)
    return names


def is_never_called(module: nn.Module) -> bool:
    """Whether the module is one of torch's lists and dictionaries: whoever selects one means its entries.

    A subclass with a ``forward`` of its own is a module like any other.
    """
    containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    return isinstance(module, containers) and type(module).forward is nn.Module.forward


def compile_glob(pattern: str) -> re.Pattern[str]:
    """The glob as a regular expression.

    Example:
        >>> [bool(compile_glob(glob).fullmatch("a.b.c")) for glob in ("**.c", "a.*", "a.**", "a.*.c", "a.**.b.c", "*")]
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


def closest_names(pattern: str, names: Iterable[str]) -> str:
    """The end of a message about a name or glob that is not among the names: the three that are nearest to it.

    Example:
        >>> closest_names("encoder.conv", ["", "encoder", "encoder.conv1", "head"])
        "the closest names are 'encoder.conv1', 'encoder', 'head'"
        >>> closest_names("**.atn", ["", "stem", "block", "block.attn", "block.mlp"])
        "the closest names are 'block.attn', 'stem', 'block'"
    """
    known = [name for name in names if name]
    # Most mistakes are in one segment: so names with nearly the same last segment, or the same first one, come before
    # what merely looks alike.
    near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.5)
    head, tail = pattern.partition(".")[0], pattern.rpartition(".")[2]
    tails = difflib.get_close_matches(tail, {name.rpartition(".")[2] for name in known}, n=3, cutoff=0.7)
    alike = [name for each in tails for name in known if name.rpartition(".")[2] == each]
    related = [name for name in known if name.partition(".")[0] == head]
    ordered = [*alike, *near, *related, *known] if "*" in pattern else [*near, *alike, *related, *known]
    closest = list(dict.fromkeys(ordered))[:3]
    if not closest:
        return "the model has no submodules"
    return "the closest names are " + ", ".join(map(repr, closest))
