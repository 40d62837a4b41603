"""The execution graph: capture, views, diffs and renderers.

Each name is loaded on first use, so that reading a graph does not import torch.
"""

# Import this function now. On first use, the module of the same name would hide it.
from lightning_recorder.graph.diff import diff as diff
from lightning_recorder.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
