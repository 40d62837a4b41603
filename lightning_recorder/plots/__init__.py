"""Images of recorded statistics. The functions take arrays and names and return pixels."""

from lightning_recorder.plots.colored_graph import StatisticStyler, color_graph
from lightning_recorder.plots.gradient_flow import gradient_flow
from lightning_recorder.plots.grids import attention_maps, feature_maps, kernels
from lightning_recorder.plots.heat_map import heat_map
from lightning_recorder.plots.histograms import histogram_over_time, ridge
from lightning_recorder.plots.overview import overview
from lightning_recorder.plots.plot_history import PlotHistory
from lightning_recorder.plots.process import DrawingProcess

__all__ = [
    "DrawingProcess",
    "PlotHistory",
    "StatisticStyler",
    "attention_maps",
    "color_graph",
    "feature_maps",
    "gradient_flow",
    "heat_map",
    "histogram_over_time",
    "kernels",
    "overview",
    "ridge",
]
