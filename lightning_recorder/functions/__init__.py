"""Torch functions and batches as sites: which functions can be recorded, their taps, and their sites in a graph.

Each name is loaded on first use, so that the names of functions are available without importing torch.
"""

from lightning_recorder.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
