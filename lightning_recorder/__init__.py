"""Record the internals of a model while it trains: execution graph, activations, gradients and parameters.

The callbacks are :class:`GraphRecorder`, :class:`ActivationRecorder`, :class:`GradientRecorder`,
:class:`ParameterRecorder` and :class:`TensorDumper`. Everything else also works in a plain PyTorch loop. Importing this
package is cheap: each name is loaded on first use.
"""

from lightning_recorder.lazy import attach_stub
from lightning_recorder.version import __version__ as __version__

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
