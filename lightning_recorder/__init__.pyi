from .callbacks import (
    ActivationRecorder,
    Check,
    CostRecorder,
    GradientRecorder,
    GraphRecorder,
    Outputs,
    ParameterRecorder,
    Schedule,
    StepWatch,
    TensorDumper,
    default_recorders,
)
from .dumps import read_dump, read_manifest
from .errors import (
    ArgumentError,
    DumpError,
    FlowError,
    ForwardError,
    RecorderError,
    RecorderWarning,
    RecordingError,
    RenderError,
    SelectionError,
    UnknownArgumentError,
)
from .graph import Drawing, Graph, capture_graph, draw, make_dot, record, render_network
from .loops import Monitor
from .recordings import Recording, Run, Series, open_recording
from .selection import Selection
from .sinks import MemorySink, Sink, register_sink
from .statistics import OptimizerRecorder, StatisticsRecorder
from .structure import iter_tensors, register_container
from .tensors import BackwardInput, BackwardOutput, ForwardInput, ForwardOutput, ForwardPre
from .wrapped import RecordedNet, Summary

__version__: str

__all__ = [
    "ActivationRecorder",
    "ArgumentError",
    "BackwardInput",
    "BackwardOutput",
    "Check",
    "CostRecorder",
    "Drawing",
    "DumpError",
    "FlowError",
    "ForwardError",
    "ForwardInput",
    "ForwardOutput",
    "ForwardPre",
    "GradientRecorder",
    "Graph",
    "GraphRecorder",
    "MemorySink",
    "Monitor",
    "OptimizerRecorder",
    "Outputs",
    "ParameterRecorder",
    "RecordedNet",
    "RecorderError",
    "RecorderWarning",
    "Recording",
    "RecordingError",
    "RenderError",
    "Run",
    "Schedule",
    "Selection",
    "SelectionError",
    "Series",
    "Sink",
    "StatisticsRecorder",
    "StepWatch",
    "Summary",
    "TensorDumper",
    "UnknownArgumentError",
    "capture_graph",
    "default_recorders",
    "draw",
    "iter_tensors",
    "make_dot",
    "open_recording",
    "read_dump",
    "read_manifest",
    "record",
    "register_container",
    "register_sink",
    "render_network",
]
