"""Torch functions and batches as sites: the functions that can be recorded, their taps, and their places in a graph.

Each name is loaded on first use, so that the names of functions do not import torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
