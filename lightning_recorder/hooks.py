"""A hook on a module that belongs to one recording, and to no copy of the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["ModuleHook"]


class ModuleHook:
    """Base of the hooks that this package puts on modules.

    A module may be copied or pickled while hooks are on it, as an averaged or a target network is. The copy belongs to
    nobody's recording: in it the hook is a function that does nothing, and neither the recording nor the original hangs
    on it.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _inert

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _make_inert, ()


def _inert(*args: Any) -> None:
    """What a hook is in a copy of its module."""


def _make_inert() -> Callable[..., None]:
    return _inert
