"""Streaming statistics with a fixed-size state that is updated on the device and merged exactly."""

from lightning_recorder.records.counts import (
    SUMMED,
    CoarseHistogram,
    SparseCounts,
    Sums,
    TaggedHistograms,
    sums_of,
    to_histogram,
)
from lightning_recorder.records.histogram import Histogram
from lightning_recorder.reductions.bank import StateBank, row_state
from lightning_recorder.reductions.base import Reduction
from lightning_recorder.reductions.combined import Combined
from lightning_recorder.reductions.compact import Collected, CompactStates, compacted
from lightning_recorder.reductions.distributions import ExpertLoad, HeadEntropy
from lightning_recorder.reductions.elementwise import BatchMax, BatchMean, BatchMin, BatchSum, Change, LastValue
from lightning_recorder.reductions.exponent_histogram import ExponentHistogram
from lightning_recorder.reductions.kernels.fused import add_tensor, prepare
from lightning_recorder.reductions.kernels.fused_cuda import prepare_device
from lightning_recorder.reductions.number_formats import FormatErrors, MassiveValues
from lightning_recorder.reductions.precision import PrecisionShares
from lightning_recorder.reductions.reservoir import Reservoir
from lightning_recorder.reductions.row import SCALAR_STATISTICS
from lightning_recorder.reductions.scalars import (
    BatchSpread,
    Extrema,
    HigherMoments,
    NearZero,
    Norms,
    RunningMoments,
    Saturation,
    Tallies,
)
from lightning_recorder.reductions.shaped import ChannelExtrema, ChannelMoments, DeadChannels, ShapedReduction
from lightning_recorder.reductions.spectrum import FeatureRank, SpectralNorm
from lightning_recorder.reductions.statistics import Statistics
from lightning_recorder.reductions.values import Values

__all__ = [
    "SCALAR_STATISTICS",
    "SUMMED",
    "BatchMax",
    "BatchMean",
    "BatchMin",
    "BatchSpread",
    "BatchSum",
    "Change",
    "ChannelExtrema",
    "ChannelMoments",
    "CoarseHistogram",
    "Collected",
    "Combined",
    "CompactStates",
    "DeadChannels",
    "ExpertLoad",
    "ExponentHistogram",
    "Extrema",
    "FeatureRank",
    "FormatErrors",
    "HeadEntropy",
    "HigherMoments",
    "Histogram",
    "LastValue",
    "MassiveValues",
    "NearZero",
    "Norms",
    "PrecisionShares",
    "Reduction",
    "Reservoir",
    "RunningMoments",
    "Saturation",
    "ShapedReduction",
    "SparseCounts",
    "SpectralNorm",
    "StateBank",
    "Statistics",
    "Sums",
    "TaggedHistograms",
    "Tallies",
    "Values",
    "add_tensor",
    "compacted",
    "prepare",
    "prepare_device",
    "row_state",
    "sums_of",
    "to_histogram",
]
