"""See the inside of a model while it trains: its execution graph, its activations and its gradients.

The three callbacks are :class:`GraphRecorder`, :class:`ActivationRecorder` and :class:`GradientRecorder`. Everything
below them works in a bare PyTorch loop. Importing this package imports nothing: each name is loaded when it is first
used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_recorder.callbacks import ActivationRecorder, GradientRecorder, GraphRecorder
    from lightning_recorder.dumps import Dump, read_dump, read_manifest
    from lightning_recorder.errors import (
        ArgumentError,
        DumpError,
        FlowError,
        ForwardError,
        RecorderError,
        RecorderWarning,
        RecordingError,
        RenderError,
        SelectionError,
    )
    from lightning_recorder.graph import (
        BaseRenderer,
        Graph,
        GraphCapture,
        GraphvizRenderer,
        GraphvizStyler,
        Layout,
        capture_graph,
        collapse,
        fit,
        fold_repeats,
    )
    from lightning_recorder.recorders import (
        BackwardInput,
        BackwardOutput,
        ForwardInput,
        ForwardOutput,
        ForwardPre,
        RecordedNet,
        Recorder,
        SiteStatistics,
        StatisticsRecorder,
        SubRecorder,
        Summary,
        SummaryRow,
    )
    from lightning_recorder.reductions import (
        BatchMax,
        BatchMean,
        BatchMin,
        BatchSum,
        Change,
        ChannelMoments,
        Combined,
        DeadChannels,
        ExponentHistogram,
        Extrema,
        HigherMoments,
        Histogram,
        LastValue,
        NearZero,
        Norms,
        Reduction,
        Reservoir,
        RunningMoments,
        Saturation,
        Statistics,
        Tallies,
        Values,
    )
    from lightning_recorder.selection import SelectedModules, Selection
    from lightning_recorder.sinks import FilesSink, MemorySink, MultiSink, Sink, TensorBoardSink, register_sink
    from lightning_recorder.structure import iter_tensors, register_container
    from lightning_recorder.taps import (
        InputGradientTap,
        InputTap,
        OutputGradientTap,
        OutputTap,
        ParameterGradientTap,
        ParameterTap,
        Site,
        Tap,
    )

__version__ = "0.1.0"

_HOMES = {
    "callbacks": ("ActivationRecorder", "GradientRecorder", "GraphRecorder"),
    "dumps": ("Dump", "read_dump", "read_manifest"),
    "errors": (
        "ArgumentError",
        "DumpError",
        "FlowError",
        "ForwardError",
        "RecorderError",
        "RecorderWarning",
        "RecordingError",
        "RenderError",
        "SelectionError",
    ),
    "graph": (
        "BaseRenderer",
        "Graph",
        "GraphCapture",
        "GraphvizRenderer",
        "GraphvizStyler",
        "Layout",
        "capture_graph",
        "collapse",
        "fit",
        "fold_repeats",
    ),
    "recorders": (
        "BackwardInput",
        "BackwardOutput",
        "ForwardInput",
        "ForwardOutput",
        "ForwardPre",
        "RecordedNet",
        "Recorder",
        "SiteStatistics",
        "StatisticsRecorder",
        "SubRecorder",
        "Summary",
        "SummaryRow",
    ),
    "reductions": (
        "BatchMax",
        "BatchMean",
        "BatchMin",
        "BatchSum",
        "Change",
        "ChannelMoments",
        "Combined",
        "DeadChannels",
        "ExponentHistogram",
        "Extrema",
        "HigherMoments",
        "Histogram",
        "LastValue",
        "NearZero",
        "Norms",
        "Reduction",
        "Reservoir",
        "RunningMoments",
        "Saturation",
        "Statistics",
        "Tallies",
        "Values",
    ),
    "selection": ("SelectedModules", "Selection"),
    "sinks": ("FilesSink", "MemorySink", "MultiSink", "Sink", "TensorBoardSink", "register_sink"),
    "structure": ("iter_tensors", "register_container"),
    "taps": (
        "InputGradientTap",
        "InputTap",
        "OutputGradientTap",
        "OutputTap",
        "ParameterGradientTap",
        "ParameterTap",
        "Site",
        "Tap",
    ),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ActivationRecorder",
    "ArgumentError",
    "BackwardInput",
    "BackwardOutput",
    "BaseRenderer",
    "BatchMax",
    "BatchMean",
    "BatchMin",
    "BatchSum",
    "Change",
    "ChannelMoments",
    "Combined",
    "DeadChannels",
    "Dump",
    "DumpError",
    "ExponentHistogram",
    "Extrema",
    "FilesSink",
    "FlowError",
    "ForwardError",
    "ForwardInput",
    "ForwardOutput",
    "ForwardPre",
    "GradientRecorder",
    "Graph",
    "GraphCapture",
    "GraphRecorder",
    "GraphvizRenderer",
    "GraphvizStyler",
    "HigherMoments",
    "Histogram",
    "InputGradientTap",
    "InputTap",
    "LastValue",
    "Layout",
    "MemorySink",
    "MultiSink",
    "NearZero",
    "Norms",
    "OutputGradientTap",
    "OutputTap",
    "ParameterGradientTap",
    "ParameterTap",
    "RecordedNet",
    "Recorder",
    "RecorderError",
    "RecorderWarning",
    "RecordingError",
    "Reduction",
    "RenderError",
    "Reservoir",
    "RunningMoments",
    "Saturation",
    "SelectedModules",
    "Selection",
    "SelectionError",
    "Sink",
    "Site",
    "SiteStatistics",
    "Statistics",
    "StatisticsRecorder",
    "SubRecorder",
    "Summary",
    "SummaryRow",
    "Tallies",
    "Tap",
    "TensorBoardSink",
    "Values",
    "capture_graph",
    "collapse",
    "fit",
    "fold_repeats",
    "iter_tensors",
    "read_dump",
    "read_manifest",
    "register_container",
    "register_sink",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
