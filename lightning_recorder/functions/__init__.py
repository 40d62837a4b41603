"""Torch functions and batches as sites: the functions that can be recorded, their taps, and their places in a graph."""

from lightning_recorder.functions.batches import BatchTap
from lightning_recorder.functions.graph_sites import function_sites, is_of_loss
from lightning_recorder.functions.losses import sides_of_loss
from lightning_recorder.functions.table import DEFAULT_KINDS, FUNCTIONS, KINDS, KNOWN, SCORE_KINDS, SCORES, function_of
from lightning_recorder.functions.tap import ChosenFunctions, FunctionGradientTap, FunctionOutputTap

__all__ = [
    "DEFAULT_KINDS",
    "FUNCTIONS",
    "KINDS",
    "KNOWN",
    "SCORES",
    "SCORE_KINDS",
    "BatchTap",
    "ChosenFunctions",
    "FunctionGradientTap",
    "FunctionOutputTap",
    "function_of",
    "function_sites",
    "is_of_loss",
    "sides_of_loss",
]
