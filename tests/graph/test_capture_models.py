"""Models as people train them: those of transformers, with their options for training on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from lightning_recorder.graph import Graph, GraphCapture
from tests.graph.queries import only, sources_of

TOKENS = torch.tensor([[5, 3, 9, 1], [2, 7, 7, 4]])
PICTURES = torch.linspace(-1.0, 1.0, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    batch: dict[str, Tensor]
    calls: dict[str, int]
    """How often modules of some classes are called in one forward pass."""


def _gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=3, n_head=2))


def _bert() -> nn.Module:
    return hf.BertForMaskedLM(
        hf.BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16)
    )


def _t5() -> nn.Module:
    config: Any = hf.T5Config  # which takes more than it declares
    return hf.T5ForConditionalGeneration(
        config(
            vocab_size=20,
            d_model=8,
            d_kv=4,
            d_ff=16,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    )


def _vit() -> nn.Module:
    return hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=8,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=16,
            image_size=32,
            patch_size=16,
            hidden_dropout_prob=0.1,
        )
    )


def _resnet() -> nn.Module:
    return hf.ResNetForImageClassification(
        hf.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 2], layer_type="basic")
    )


def _checkpointed_gpt2() -> nn.Module:
    model = _gpt2()
    model.gradient_checkpointing_enable()  # type: ignore[operator]  # nn.Module hides the method
    return model


WORDS = {"input_ids": TOKENS, "labels": TOKENS.clone()}
LABELLED = {"pixel_values": PICTURES, "labels": torch.tensor([0, 1])}
CASES = {
    # Two layer norms per block and one at the end, and so on.
    "GPT-2": Case(_gpt2, WORDS, {"GPT2Block": 3, "Conv1D": 12, "LayerNorm": 7, "Embedding": 2}),
    "GPT-2, checkpointed": Case(_checkpointed_gpt2, WORDS, {"GPT2Block": 3, "Conv1D": 12, "LayerNorm": 7}),
    # Six linear layers per block, one before and one in the decoder.
    "BERT": Case(_bert, WORDS, {"BertLayer": 3, "Linear": 20, "Embedding": 3}),
    # Encoder blocks have four projections and two in the feed-forward part, decoder blocks eight and two.
    "T5": Case(_t5, WORDS, {"T5Block": 4, "Linear": 33}),
    # Six linear layers per block and the classifier.
    "ViT": Case(_vit, LABELLED, {"ViTLayer": 3, "Linear": 19, "Conv2d": 1}),
    # The stem, two per block, and a shortcut where the number of channels or the resolution changes.
    "ResNet": Case(_resnet, LABELLED, {"ResNetBasicLayer": 3, "Linear": 1}),
}


def _step(model: nn.Module, batch: dict[str, Tensor], *, captured: bool) -> tuple[dict[str, Tensor], Graph | None]:
    model.train().zero_grad()
    torch.manual_seed(7)
    recording = GraphCapture(model, batch, name="batch") if captured else None
    if recording is None:
        loss: Any = model(**batch).loss
        loss.backward()
    else:
        with recording:
            loss = model(**batch).loss
            loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}, recording.graph() if recording else None


# The new name of the method is not known to older releases of transformers.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_transformers_model(case: Case) -> None:
    """A model of transformers is recorded call by call, from its batch to its loss, and trains as without a capture."""
    torch.manual_seed(0)
    model = case.make()
    expected, _ = _step(model, case.batch, captured=False)
    seen, graph = _step(model, case.batch, captured=True)
    assert expected.keys() == seen.keys()
    assert [name for name in expected if not torch.equal(expected[name], seen[name])] == []
    assert graph is not None
    counted = [node.type_name for node in graph.module_calls()]
    assert {name: counted.count(name) for name in case.calls} == case.calls
    (backward,) = (node for node in graph.nodes if node.kind == "backward")
    assert {only(graph, f"batch.{name}").id for name in case.batch} <= sources_of(graph, backward.id)
