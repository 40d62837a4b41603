"""Which parts of a model are compiled."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from lightning_recorder.autograd import is_compiled

__all__ = ["compiled_modules", "flex_attention_users"]


def compiled_modules(root: nn.Module) -> set[nn.Module]:
    """The modules whose calls run compiled code, with all that is in them.

    Compiled by ``torch.compile(module)``, by ``module.compile()``, or as a LightningModule as a whole. Functions that
    were compiled are not seen.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Sequential(nn.ReLU()), backend="eager"))
        >>> sorted(type(each).__name__ for each in compiled_modules(net))
        ['OptimizedModule', 'ReLU', 'Sequential']
    """
    if "torch._dynamo" not in sys.modules:
        return set()
    if getattr(root, "_compiler_ctx", None) is not None:  # what Lightning keeps of a compiled LightningModule
        return set(root.modules())
    found: set[nn.Module] = set()
    for module in root.modules():
        if is_compiled(module):
            found.update(module.modules())
    return found


def flex_attention_users(root: nn.Module) -> list[str]:
    """The names of the modules that use ``flex_attention``, which takes much more memory where it is not compiled.

    Found by the name in the code of their ``forward``, or in the configuration of a model of transformers.
    """
    return [name for name, module in root.named_modules() if _uses_flex_attention(module)]


def _uses_flex_attention(module: nn.Module) -> bool:
    config: Any = getattr(module, "config", None)
    code = getattr(type(module).forward, "__code__", None)
    named = "flex_attention" in getattr(code, "co_names", ())
    return named or getattr(config, "_attn_implementation", None) == "flex_attention"
