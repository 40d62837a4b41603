"""Recorders in any loop: they read a small object instead of a Lightning Trainer, and `Monitor` calls their hooks."""

from lightning_recorder.loops.fabric import FabricCallback
from lightning_recorder.loops.monitor import Monitor

__all__ = ["FabricCallback", "Monitor"]
