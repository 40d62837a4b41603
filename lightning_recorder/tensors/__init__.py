"""Recorders that keep the tensors themselves, for any PyTorch loop."""

from lightning_recorder.tensors.backward import BackwardInput, BackwardOutput
from lightning_recorder.tensors.base import Recorder
from lightning_recorder.tensors.buffers import BufferPool
from lightning_recorder.tensors.capture import TENSOR_KINDS, Captured, TensorCapture
from lightning_recorder.tensors.forward import ForwardInput, ForwardOutput, ForwardPre
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
