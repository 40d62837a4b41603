from .batches import BatchTap
from .graph_sites import function_sites, is_of_loss
from .known import KNOWN
from .losses import sides_of_loss
from .table import DEFAULT_KINDS, FUNCTIONS, KINDS, SCORE_KINDS, SCORES, function_of
from .tap import ChosenFunctions, FunctionGradientTap, FunctionOutputTap

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
