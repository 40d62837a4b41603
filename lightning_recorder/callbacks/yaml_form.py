"""The YAML form of callbacks, which Lightning writes as part of the hyperparameters."""

from __future__ import annotations

import types
from typing import Any

import yaml  # type: ignore[import-untyped]  # its stubs are another package

from lightning_recorder.portable import Portable

__all__ = ["register_yaml"]


def register_yaml(kind: type) -> None:
    """Make instances of a class and of its subclasses representable in YAML, whatever their attributes are."""
    yaml.add_multi_representer(kind, _represent)


def _represent(dumper: Any, callback: Any) -> Any:
    """Represent a callback in YAML, with ``str()`` of each attribute that YAML cannot represent.

    Lightning writes hyperparameters as YAML, which can include callbacks, and handles no error other than TypeError.
    """
    state = {name: each if _is_representable(each) else str(each) for name, each in callback.__getstate__().items()}
    kind = type(callback)
    return dumper.represent_mapping(f"tag:yaml.org,2002:python/object:{kind.__module__}.{kind.__qualname__}", state)


def _represent_portable(dumper: Any, portable: Portable) -> Any:
    is_named = isinstance(portable.value, (types.FunctionType, types.BuiltinFunctionType, type))
    return (
        dumper.represent_data(portable.value) if is_named and portable.is_plain else dumper.represent_str(str(portable))
    )


def _is_representable(value: object) -> bool:
    try:
        yaml.dump(value)
    except Exception:  # noqa: BLE001 - PyYAML raises any error, such as AttributeError for a torch.dtype
        return False
    return True


yaml.add_multi_representer(Portable, _represent_portable)
