"""Lightning callbacks: a thin layer between the trainer and the recorders, which do not depend on Lightning."""

from lightning_recorder.callbacks.activation import ActivationRecorder
from lightning_recorder.callbacks.check import Check
from lightning_recorder.callbacks.cost import CostRecorder
from lightning_recorder.callbacks.default_set import default_recorders
from lightning_recorder.callbacks.dumper import TensorDumper
from lightning_recorder.callbacks.gradient import GradientRecorder
from lightning_recorder.callbacks.graph import GraphRecorder
from lightning_recorder.callbacks.output_options import Outputs
from lightning_recorder.callbacks.parameter import ParameterRecorder
from lightning_recorder.callbacks.watch import StepWatch
from lightning_recorder.schedule import Schedule

__all__ = [
    "ActivationRecorder",
    "Check",
    "CostRecorder",
    "GradientRecorder",
    "GraphRecorder",
    "Outputs",
    "ParameterRecorder",
    "Schedule",
    "StepWatch",
    "TensorDumper",
    "default_recorders",
]
