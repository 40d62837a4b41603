"""Write records and graphs to sinks, record files, dumps, pictures and the coverage report."""

from lightning_recorder.outputs.coverage import Coverage
from lightning_recorder.outputs.dump_folder import DumpFolder
from lightning_recorder.outputs.dumps import (
    TENSOR_DUMP_TIMES,
    Event,
    StatisticsDumps,
    TensorDumps,
    check_dumps,
)
from lightning_recorder.outputs.findings import RunFindings
from lightning_recorder.outputs.formatter import SinkFormatter, TagBudget
from lightning_recorder.outputs.graph_output import GraphOutput
from lightning_recorder.outputs.pipeline import RecordConsumer, RecordFile, RecordPipeline
from lightning_recorder.outputs.plotter import DrawingTime, Plotter
from lightning_recorder.outputs.receipt import write_receipt

__all__ = [
    "TENSOR_DUMP_TIMES",
    "Coverage",
    "DrawingTime",
    "DumpFolder",
    "Event",
    "GraphOutput",
    "Plotter",
    "RecordConsumer",
    "RecordFile",
    "RecordPipeline",
    "RunFindings",
    "SinkFormatter",
    "StatisticsDumps",
    "TagBudget",
    "TensorDumps",
    "check_dumps",
    "write_receipt",
]
