"""Custom functions with their own gradient."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd import Function

__all__ = [
    "Batched",
    "Best",
    "Differentiating",
    "Foreign",
    "Inner",
    "Mixed",
    "Moved",
    "Outer",
    "OuterForeign",
    "Scale",
    "Through",
    "Two",
    "WithModule",
    "Written",
]


class _Custom(Function):
    """A base class whose ``apply`` can be called under mypy, since torch has no annotations for it."""

    apply: ClassVar[Any]


class Scale(_Custom):
    """Uses the style with a context, for two tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x.exp() * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, scale = ctx.saved_tensors
        return gradient * x.exp() * scale, (gradient * x.exp()).sum()


class Moved(_Custom):
    """Uses the style with ``setup_context``."""

    @staticmethod
    def forward(x: Tensor, by: Tensor) -> Tensor:
        return x.sin() + by

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0].clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.saved_tensors[0].cos(), gradient.sum()


class Two(_Custom):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.exp(), x.sum()

    @staticmethod
    def backward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
        return one + other


class Best(_Custom):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        values, places = x.max(1)
        ctx.mark_non_differentiable(places)
        return values, places

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:
        return gradient[:, None].expand(2, 4)


class Foreign(_Custom):
    """Computes outside of torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Inner(_Custom):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Outer(_Custom):
    """Applies another function before and after an operation of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return Inner.apply(Inner.apply(x).exp()) + 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Differentiating(_Custom):
    """Keeps a backward graph of its own, as an implicit layer does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            result: Tensor = Inner.apply(x.detach().requires_grad_())
        return result.detach() + 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class OuterForeign(_Custom):
    """Applies a function that computes outside of torch, and does nothing else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return Foreign.apply(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Mixed(_Custom):
    """Computes one result in torch, with an in-place write, and another one outside of torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        doubled = x * 2
        doubled.add_(1)
        return doubled, torch.from_numpy(x.detach().numpy().sum(0))

    @staticmethod
    def backward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
        return one * 2 + other


class WithModule(_Custom):
    """Calls a module between two operations of its own, as a reversible block does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        doubled = x * 2
        result: Tensor = module(doubled) + doubled
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class Written(_Custom):
    """Writes into its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Through(_Custom):
    """Returns its argument and reverses the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Batched(_Custom):
    """Supports ``vmap``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.saved_tensors[0]
