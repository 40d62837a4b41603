"""Taps: hooks that hand the tensors of chosen modules to a receiver and leave the training as it is."""

from lightning_recorder.taps.backward import OutputGradientTap
from lightning_recorder.taps.base import Receiver, Site, Tap
from lightning_recorder.taps.forward import OutputTap

__all__ = ["OutputGradientTap", "OutputTap", "Receiver", "Site", "Tap"]
