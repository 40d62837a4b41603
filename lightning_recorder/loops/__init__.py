"""Recorders in any loop: a small object replaces the Lightning Trainer, and `Monitor` calls the recorders' hooks."""

from lightning_recorder.loops.fabric import FabricCallback
from lightning_recorder.loops.monitor import Monitor

__all__ = ["FabricCallback", "Monitor"]
