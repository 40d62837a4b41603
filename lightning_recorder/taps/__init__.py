"""Taps: hooks that hand the tensors of chosen modules to a receiver and leave the training as it is."""

from lightning_recorder.taps.base import Receiver, Site, Tap
from lightning_recorder.taps.forward import InputTap, OutputTap
from lightning_recorder.taps.gradient import OutputGradientTap
from lightning_recorder.taps.input_gradient import InputGradientTap
from lightning_recorder.taps.parameter import ParameterGradientTap, ParameterTap

__all__ = [
    "InputGradientTap",
    "InputTap",
    "OutputGradientTap",
    "OutputTap",
    "ParameterGradientTap",
    "ParameterTap",
    "Receiver",
    "Site",
    "Tap",
]
