"""State dictionary hooks that hide the name of the wrapped net: functions, so that the wrapper can be pickled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

__all__ = ["NET", "add_prefix", "name_as_in_net", "remove_prefix"]

NET = "_net"
"""The name of the wrapped net in its wrapper."""


def _renamed(keys: Iterable[str], old: str, new: str) -> dict[str, str]:
    return {key: new + key[len(old) :] for key in keys if key.startswith(old)}


def remove_prefix(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: object) -> None:
    """Rename the entries of a state dictionary to the names in the net itself."""
    inner = f"{prefix}{NET}."
    _rename(state_dict, _renamed(state_dict, inner, prefix))
    metadata = getattr(state_dict, "_metadata", {})
    # Module versions are needed under the net's names by the bare net, and under the original names by a wrapper.
    for key in [key for key in metadata if f"{key}.".startswith(inner)]:
        metadata[(prefix + f"{key}."[len(inner) :])[:-1]] = metadata[key]


def add_prefix(module: nn.Module, state_dict: dict[str, Any], prefix: str, *others: object) -> None:
    """Rename the entries of a state dictionary to the names that torch expects."""
    inner = f"{prefix}{NET}."
    names = _renamed(state_dict, prefix, inner)
    # The state dictionary of scio's wrapper already has the names that torch expects.
    if not all(key.startswith(inner) for key in names) or hasattr(vars(module)["_modules"][NET], NET):
        _rename(state_dict, names)
    # The module versions saved with a bare net can be read only if load_state_dict was called on the wrapper itself.
    # Inside another module, torch passes only the metadata below this prefix.
    metadata = getattr(state_dict, "_metadata", {})
    for key in [key for key in metadata if f"{key}.".startswith(prefix) and not f"{key}.".startswith(inner)]:
        metadata.setdefault((inner + f"{key}."[len(prefix) :])[:-1], metadata[key])
    vars(module)["_prefix"] = inner


def name_as_in_net(module: nn.Module, incompatible_keys: Any) -> None:
    """Rename missing and unexpected keys like those of the state dictionary."""
    inner = vars(module).pop("_prefix", None)
    if inner is None:
        return
    outer = inner[: -len(NET) - 1]
    for keys in (incompatible_keys.missing_keys, incompatible_keys.unexpected_keys):
        renamed = _renamed(keys, inner, outer)
        keys[:] = [renamed.get(key, key) for key in keys]


def _rename(state_dict: dict[str, Any], names: Mapping[str, str]) -> None:
    # Pop all entries first: a new name may equal another entry's old name.
    entries = {new: state_dict.pop(old) for old, new in names.items()}
    state_dict.update(entries)
