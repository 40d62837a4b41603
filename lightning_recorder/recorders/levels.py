"""State dictionaries of a module that wraps another, under the names of the one that is wrapped.

The hooks are functions, so that what has them can be pickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

__all__ = ["NET", "leave_level_out", "name_as_in_net", "put_level_in"]

NET = "_net"
"""The name of the wrapped module in the wrapper, which is left out."""


def _renamed(keys: Iterable[str], old: str, new: str) -> dict[str, str]:
    return {key: new + key[len(old) :] for key in keys if key.startswith(old)}


def leave_level_out(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: object) -> None:
    """Name the entries of a state dictionary as the net itself does."""
    inner = f"{prefix}{NET}."
    _rename(state_dict, _renamed(state_dict, inner, prefix))
    metadata = getattr(state_dict, "_metadata", {})
    # The versions of modules are wanted under the net's names by the bare net, and under these by a wrapper.
    for key in [key for key in metadata if f"{key}.".startswith(inner)]:
        metadata[(prefix + f"{key}."[len(inner) :])[:-1]] = metadata[key]


def put_level_in(module: nn.Module, state_dict: dict[str, Any], prefix: str, *others: object) -> None:
    """Name the entries of a state dictionary as torch looks for them."""
    inner = f"{prefix}{NET}."
    _rename(state_dict, _renamed(state_dict, prefix, inner))
    # Of a bare net the versions are known only where the wrapper itself is loaded: further in torch shows no more.
    metadata = getattr(state_dict, "_metadata", {})
    for key in [key for key in metadata if f"{key}.".startswith(prefix) and not f"{key}.".startswith(inner)]:
        metadata.setdefault((inner + f"{key}."[len(prefix) :])[:-1], metadata[key])
    vars(module)["_level"] = inner


def name_as_in_net(module: nn.Module, incompatible_keys: Any) -> None:
    """Name what is missing or unexpected as the state dictionary does."""
    inner = vars(module).pop("_level", None)
    if inner is None:
        return
    outer = inner[: -len(NET) - 1]
    for keys in (incompatible_keys.missing_keys, incompatible_keys.unexpected_keys):
        renamed = _renamed(keys, inner, outer)
        keys[:] = [renamed.get(key, key) for key in keys]


def _rename(state_dict: dict[str, Any], names: Mapping[str, str]) -> None:
    # Out with all of them first: one's new name may be another's old one.
    entries = {new: state_dict.pop(old) for old, new in names.items()}
    state_dict.update(entries)
