"""The outputs of selected calls in one forward pass, as they were when the calls ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_recorder.errors import warn
from lightning_recorder.internals.autograd import version_of
from lightning_recorder.internals.pause_recording import pause_recording
from lightning_recorder.structure import describe_unknown, iter_tensors
from lightning_recorder.wrapped.calls import Call, CallWatch, Label

__all__ = ["OutputRecorder", "Postprocessor", "SavedOutput"]

Postprocessor = Callable[[Any], Any]
"""A function that takes a module's output and returns a replacement, or ``None`` to leave it unchanged."""


class SavedOutput:
    """A tensor as it was when a hook saw it."""

    def __init__(self, tensor: Tensor, version: int | None, copy: Tensor) -> None:
        self._tensor = tensor
        self._saved_version = version
        self._copy = copy

    @classmethod
    def of(cls, tensor: Tensor) -> SavedOutput:
        """Save the current state of a tensor."""
        # Autograd is on in any mode, so that the copy requires a gradient exactly if the tensor does.
        with pause_recording(), torch.enable_grad():
            return cls(tensor, version_of(tensor), tensor.clone())

    @property
    def value(self) -> Tensor:
        """The tensor itself if it has not been modified since, else the copy."""
        unchanged = self._saved_version is not None and version_of(self._tensor) == self._saved_version
        return self._tensor if unchanged else self._copy

    def matches(self, tensor: Tensor) -> bool:
        """Return True if this is the same tensor with the same values."""
        return self._tensor is tensor and self._saved_version is not None and version_of(tensor) == self._saved_version


def _warn_unknown(name: str, path: str, value: object, error: Exception | None) -> None:
    warn(f"RecordedNet ignores {describe_unknown(name, path, value, error)}")


class OutputRecorder(CallWatch):
    """A watch of one recorded forward pass."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        labels: Mapping[Call, Label],
        postprocs: Mapping[Label, Postprocessor],
        keep: bool,
    ) -> None:
        super().__init__(modules)
        self.records: dict[Label, SavedOutput | dict[str, SavedOutput]] = {}
        self._labels = labels
        self._postprocs = postprocs
        self._keep = keep
        self._latest: dict[int, SavedOutput] = {}

    def end(self, call: Call, output: Any) -> Any:
        """Record and postprocess the output of a recorded call."""
        label = self._labels.get(call)
        if label is None:
            return None
        if self._keep:
            if isinstance(output, Tensor):
                self.records[label] = self._saved(output)
            else:
                tensors = iter_tensors(output, unknown=partial(_warn_unknown, call.name))
                self.records[label] = {path: self._saved(tensor) for path, tensor in tensors}
        postproc = self._postprocs.get(label)
        return None if postproc is None else postproc(output)

    def _saved(self, tensor: Tensor) -> SavedOutput:
        # A parent often returns its last child's output: one copy serves both.
        saved = self._latest.get(id(tensor))
        if saved is None or not saved.matches(tensor):
            saved = self._latest[id(tensor)] = SavedOutput.of(tensor)
        return saved
