"""Taps: hooks that pass the tensors of selected modules to a receiver without affecting the training."""

from lightning_recorder.taps.base import Receiver, Site, Tap
from lightning_recorder.taps.costs import CostTap
from lightning_recorder.taps.forward import InputTap, OutputTap, ParameterTap
from lightning_recorder.taps.gradient import ParameterGradientTap
from lightning_recorder.taps.input_gradient import InputGradientTap
from lightning_recorder.taps.output_gradient import OutputGradientTap
from lightning_recorder.taps.traced import TracedTap

__all__ = [
    "CostTap",
    "InputGradientTap",
    "InputTap",
    "OutputGradientTap",
    "OutputTap",
    "ParameterGradientTap",
    "ParameterTap",
    "Receiver",
    "Site",
    "Tap",
    "TracedTap",
]
