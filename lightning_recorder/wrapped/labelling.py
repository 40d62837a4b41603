"""The run that labels a net's calls without side effects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_recorder.errors import RecordingError
from lightning_recorder.internals.pause_recording import pause_recording
from lightning_recorder.internals.preserve_state import ModuleState, own_copies, same_gradients, same_random_numbers
from lightning_recorder.structure import iter_tensors
from lightning_recorder.wrapped.calls import CallWatch

__all__ = ["run_without_trace"]


def run_without_trace(
    net: nn.Module, watch: CallWatch, snapshot: ModuleState, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Run the net once in its current mode, without autograd, and restore everything afterwards, even if it raises.

    Args:
        net: The net.
        watch: The watch that is active while the net runs.
        snapshot: The snapshot of the net's modules, restored afterwards.
        args: The positional arguments; the net receives copies.
        kwargs: The keyword arguments; the net receives copies.

    Raises:
        RecordingError: If the net raises; names the module that raised.
    """
    with pause_recording():
        copies = own_copies({**dict(enumerate(args)), **kwargs})
        args, kwargs = tuple(copies[index] for index in range(len(args))), {key: copies[key] for key in kwargs}
        tensors = (*net.parameters(), *net.buffers(), *(tensor for _, tensor in iter_tensors((args, kwargs))))
        try:
            with same_gradients(tensors), same_random_numbers({tensor.device for tensor in tensors}), watch:
                net(*args, **kwargs)
        except Exception as error:
            module, where = _raised_in(error, watch.modules) or (net, "the net itself")
            message = f"the labelling run failed in {where} ({type(module).__name__}): {type(error).__name__}: {error}"
            raise RecordingError(message) from error
        finally:
            snapshot.restore()


def _raised_in(error: BaseException, modules: Mapping[str, nn.Module]) -> tuple[nn.Module, str] | None:
    """Return the innermost module in whose method an error was raised and its description, or ``None``."""
    names = {id(module): name for name, module in modules.items()}
    found = None
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and names.get(id(owner)):
            found = owner, f"module {names[id(owner)]!r}"
        trace = trace.tb_next
    return found
