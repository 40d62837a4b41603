"""Lightning callbacks: a thin layer between the trainer and the recorders, which do not depend on Lightning."""

from lightning_recorder.callbacks.activation import ActivationRecorder
from lightning_recorder.callbacks.dumper import TensorDumper
from lightning_recorder.callbacks.gradient import GradientRecorder
from lightning_recorder.callbacks.graph import GraphRecorder
from lightning_recorder.callbacks.parameter import ParameterRecorder

__all__ = ["ActivationRecorder", "GradientRecorder", "GraphRecorder", "ParameterRecorder", "TensorDumper"]
