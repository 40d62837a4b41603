"""Module hooks that belong to one recording."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_recorder.internals.hooks import ModuleHook


class Note(ModuleHook):
    """Append the calls of its module to a list, like a recording."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.calls.append(type(module).__name__)


def deep_copy(module: nn.Module) -> nn.Module:
    """Copy a module as EMA and SWA do."""
    return copy.deepcopy(module)


def pickled(module: nn.Module) -> nn.Module:
    """Copy a module as for another process."""
    return pickle.loads(pickle.dumps(module))  # type: ignore[no-any-return]


def pickled_twice(module: nn.Module) -> nn.Module:
    """Copy a copy."""
    return pickled(pickled(module))


@pytest.mark.parametrize("duplicate", [deep_copy, pickled, pickled_twice])
def test_in_a_copy_the_hook_does_nothing(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    """A copy of a hooked module runs without the hook, and the hook on the original keeps working."""
    module = nn.ReLU()
    calls: list[str] = []
    module.register_forward_hook(Note(calls))
    twin = duplicate(module)
    assert twin(torch.tensor([-1.0, 1.0])).tolist() == [0.0, 1.0]
    assert calls == []
    module(torch.ones(1))
    assert calls == ["ReLU"]


@pytest.mark.parametrize("duplicate", [deep_copy, pickled])
def test_a_copy_does_not_hang_on_the_recording(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    """The state of a hook is neither copied nor kept alive by the copy, and need not be picklable."""

    class Recording(list[str]):
        def __reduce__(self) -> str:
            raise TypeError("a recording cannot be copied")

    module, recording = nn.ReLU(), Recording()
    handle = module.register_forward_hook(Note(recording))
    twin = duplicate(module)
    handle.remove()
    reference = weakref.ref(recording)
    del recording, module, handle
    gc.collect()
    assert reference() is None
    assert len(twin._forward_hooks) == 1


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_a_module_with_a_hook_cannot_be_scripted() -> None:
    """The error of ``torch.jit.script`` says what to do, and other code may ask a hook for its name."""
    net = nn.Linear(2, 2)
    net.register_forward_hook(Note([]))
    with pytest.raises(AttributeError, match="script it before the fit"):
        torch.jit.script(net)
    assert getattr(Note([]), "__name__", "none") == "none"
