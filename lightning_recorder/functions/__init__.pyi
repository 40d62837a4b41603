from .batch_tap import BatchTap
from .losses import sides_of_loss
from .table import DEFAULT_KINDS, FUNCTIONS, KINDS, SCORE_KINDS, SCORES, function_of, function_sites, is_of_loss
from .tap import KNOWN, ChosenFunctions, FunctionGradientTap, FunctionOutputTap

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
