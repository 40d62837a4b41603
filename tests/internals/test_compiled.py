"""Detection of the compiled parts of a model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_recorder.internals.compiled import compiled_modules, flex_attention_users, observe_compiled_calls


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


def by_wrapper(module: nn.Module) -> nn.Module:
    wrapped: nn.Module = torch.compile(module, backend="eager")  # type: ignore[assignment]  # torch declares a function
    return wrapped


def in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize("compile_it", [by_wrapper, in_place])
def test_what_is_compiled_and_all_in_it(compile_it: object) -> None:
    """A compiled module and its descendants are found; its siblings and its parent are not."""
    assert callable(compile_it)
    inner = block()
    net = nn.Sequential(block(), compile_it(inner))
    found = compiled_modules(net)
    assert found == {net[1], *inner.modules()}


def test_nothing_is_compiled() -> None:
    """A plain model has no compiled parts."""
    assert compiled_modules(block()) == set()


class Flexible(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = flex_attention(x, x, x)
        return y


def test_users_of_flex_attention() -> None:
    """Users of ``flex_attention`` are found by the code of their forward or by their transformers configuration."""
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    config._attn_implementation = "flex_attention"
    net = nn.ModuleDict({"plain": block(), "own": Flexible()})
    assert flex_attention_users(net) == ["own"]
    assert "model.layers.0.self_attn" in flex_attention_users(LlamaForCausalLM(config))


def test_an_abandoned_observer_leaves_torch_as_it_was() -> None:
    """An observer that is freed while it observes is removed, so compiled calls run no code of the package."""
    from torch._dynamo import eval_frame  # not loaded before the first compiled call

    class Observer:
        def see(self, function: object) -> None:
            pass

    before = eval_frame._callback_from_stance
    observer = Observer()
    assert observe_compiled_calls(observer.see)
    assert eval_frame._callback_from_stance is not before
    del observer
    assert eval_frame._callback_from_stance is before
