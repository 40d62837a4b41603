"""Recorders that keep the tensors themselves, for any PyTorch loop."""

from lightning_recorder.tensors.base import Recorder
from lightning_recorder.tensors.capture import TENSOR_KINDS, BufferPool, Captured, TensorCapture
from lightning_recorder.tensors.module_recorders import (
    BackwardInput,
    BackwardOutput,
    ForwardInput,
    ForwardOutput,
    ForwardPre,
)
from lightning_recorder.tensors.subrecorder import SubRecorder

__all__ = [
    "TENSOR_KINDS",
    "BackwardInput",
    "BackwardOutput",
    "BufferPool",
    "Captured",
    "ForwardInput",
    "ForwardOutput",
    "ForwardPre",
    "Recorder",
    "SubRecorder",
    "TensorCapture",
]
