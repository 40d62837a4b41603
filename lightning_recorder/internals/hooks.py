"""Module hooks that belong to one recording and become no-ops in copies of the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["ModuleHook"]


class ModuleHook:
    """Base class of the hooks that this package registers on modules.

    A module may be copied or pickled while it has hooks, for example as an averaged or a target network. The copy does
    not belong to a recording: its hook is a no-op function without references to the recording or the original module.
    """

    @property
    def __name__(self) -> str:
        # torch.jit.script reads the name of each hook before it compiles its code.
        raise AttributeError(
            "torch.jit.script cannot compile a module while a recorder has hooks on it: script it before the fit, or "
            "in a step that is not recorded"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _inert

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _make_inert, ()


def _inert(*args: Any) -> None:
    """The no-op that replaces a hook in a copy of its module."""


def _make_inert() -> Callable[..., None]:
    return _inert
