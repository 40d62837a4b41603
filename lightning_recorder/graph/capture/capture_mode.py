"""The function mode that observes the torch functions of a recording."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_recorder.graph.capture.call_arguments import in_order
from lightning_recorder.graph.capture.function_calls import PLAIN, tensors_in
from lightning_recorder.graph.capture.step import StepRecording
from lightning_recorder.internals.autograd import (
    counted_version,
    current_function_mode,
    sequence_number,
    versions_of,
    without_functions,
)

__all__ = ["CaptureMode"]

_BACKWARD = (Tensor.backward, torch.autograd.backward)


class CaptureMode(TorchFunctionMode):
    """Passes each call of a torch function from outside of torch to a recording.

    Args:
        recording: The recording.
        watching: Returns True if the current call is part of the recording.
        guarded: Calls a function without observing its torch functions. If it raises, the recording ends.
        broken: Ends the recording after an internal error.
        pause: Removes this mode during a module's call.
    """

    def __init__(
        self,
        recording: StepRecording,
        watching: Callable[[], bool],
        guarded: Callable[..., Any],
        broken: Callable[[Exception], None],
        pause: Callable[[nn.Module], None],
    ) -> None:
        super().__init__()
        self._recording = recording
        self._watching = watching
        self._guarded = guarded
        self._broken = broken
        self.pause = pause
        self._note = recording.fast_path.note
        # The names of the functions that need no special treatment.
        self._usual: dict[Any, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._watching():
            return func(*args, **kwargs) if kwargs else func(*args)
        # No mode is active inside this method. So if func is a composite function or a backward pass, the torch
        # functions that it calls are not observed.
        name = self._usual.get(func)
        if name is None or kwargs or current_function_mode() is not None:
            return self._record(func, args, kwargs or {})
        inputs: list[Tensor] = []
        for each in args:
            kind: type = type(each)
            if kind is Tensor or kind is nn.Parameter:
                inputs.append(each)
            elif kind not in PLAIN:
                return self._record(func, args, {})
        try:
            before: list[int | None] = [*map(counted_version, inputs)]
        except RuntimeError:  # inference tensors have no version counter
            return self._record(func, args, {})
        start = sequence_number()
        try:
            result = func(*args)
        except Exception:
            self._guarded(self._recording.suspect, func, inputs)
            raise
        try:
            if (
                type(result) is not Tensor
                or before != [*map(counted_version, inputs)]
                or not self._note(func, name, args, inputs, start, result)
            ):
                self._recording.note_function(func, args, {}, inputs, before, start, result)
        except Exception as error:  # noqa: BLE001 - an error of the recording must not fail the model
            self._broken(error)
        return result

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call and record any function."""
        recording, guarded = self._recording, self._guarded
        if func is _BACKWARD[0] or func is _BACKWARD[1]:
            given = args[1:2] or (kwargs.get("gradient"), kwargs.get("grad_tensors"))
            node = guarded(recording.note_backward, args[:1] or kwargs.get("tensors"), given)
            try:
                return func(*args, **kwargs)
            except Exception:
                recording.backward_failed(node)
                raise
            finally:
                guarded(recording.gradients.end_backward)
        costs = recording.costs
        begun = 0.0 if costs is None else time.perf_counter()
        inputs: list[Tensor] | None = None
        try:
            with without_functions():
                if costs is None and (name := recording.usual_name(func)):
                    self._usual[func] = name
                inputs = tensors_in((*args, *in_order(func, kwargs)) if kwargs else args)
                before = versions_of(inputs)
        except Exception as error:  # noqa: BLE001 - an error of the recording must not fail the model
            inputs = None
            self._broken(error)
        start = sequence_number()
        called = 0.0 if costs is None else time.perf_counter()
        try:
            result = func(*args, **kwargs)
        except Exception:
            if inputs is not None:
                guarded(recording.suspect, func, inputs)
            raise
        if inputs is None:
            return result
        if func is torch.autograd.grad:
            guarded(recording.note_grad, inputs, result)
        else:
            # _guarded is not used here, to avoid its overhead on each function.
            try:
                with without_functions():
                    ended = 0.0 if costs is None else time.perf_counter()
                    node = recording.note_function(func, args, kwargs, inputs, before, start, result)
                    if costs is not None:
                        costs.note(node, func, args, kwargs, ended - called)
                        costs.overhead_s += called - begun + time.perf_counter() - ended
            except Exception as error:  # noqa: BLE001 - an error of the recording must not fail the model
                self._broken(error)
        return result
