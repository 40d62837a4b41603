"""Models of transformers as they are trained, with their training options."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from lightning_recorder.graph import Graph, GraphCapture, Node, capture_graph
from lightning_recorder.structure import iter_tensors
from tests.graph.nets import Net
from tests.graph.queries import only, sources_of

TOKENS = torch.tensor([[5, 3, 9, 1], [2, 7, 7, 4]])
PICTURES = torch.linspace(-1.0, 1.0, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)
SOUNDS = torch.linspace(-1.0, 1.0, 2 * 400).reshape(2, 400)
SPECTRA = torch.linspace(-1.0, 1.0, 2 * 4 * 16).reshape(2, 4, 16)
BOXES = {"class_labels": torch.tensor([0]), "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.2]])}

TINY: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
TINY_PAIR: dict[str, Any] = {
    "vocab_size": 20,
    "d_model": 8,
    **{f"{half}_layers": 1 for half in ("encoder", "decoder")},
    **{f"{half}_attention_heads": 2 for half in ("encoder", "decoder")},
    **{f"{half}_ffn_dim": 16 for half in ("encoder", "decoder")},
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    batch: Mapping[str, Any]
    calls: Mapping[str, int]
    """The number of calls per module class in one forward pass."""


def _gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=3, n_head=2))


def _bert() -> nn.Module:
    return hf.BertForMaskedLM(
        hf.BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16)
    )


def _t5() -> nn.Module:
    config: Any = hf.T5Config  # takes more than it declares
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


def _made(model: str, **options: Any) -> nn.Module:
    """Return a model by its class, with the matching configuration."""
    kind: Any = getattr(hf, model)
    made: nn.Module = kind(kind.config_class(**options))
    return made


def _clip() -> nn.Module:
    both = {key: value for key, value in TINY.items() if key != "vocab_size"}
    words = {**TINY, "max_position_embeddings": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    pictures = {**both, "image_size": 32, "patch_size": 16}
    return _made("CLIPModel", text_config=words, vision_config=pictures, projection_dim=4)


def _detr() -> nn.Module:
    config: Any = hf.ResNetConfig  # takes more than it declares
    backbone = config(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", out_features=["stage2"])
    options = {**TINY_PAIR, "num_queries": 3, "num_labels": 2, "backbone_config": backbone, "use_timm_backbone": False}
    for key in ("vocab_size", "pad_token_id", "decoder_start_token_id", "bos_token_id", "eos_token_id"):
        del options[key]
    return _made("DetrForObjectDetection", use_pretrained_backbone=False, **options)


WORDS = {"input_ids": TOKENS, "labels": TOKENS.clone()}
LABELLED = {"pixel_values": PICTURES, "labels": torch.tensor([0, 1])}
CASES = {
    # Two layer norms per block and one at the end; the other numbers are derived in the same way.
    "GPT-2": Case(_gpt2, WORDS, {"GPT2Block": 3, "Conv1D": 12, "LayerNorm": 7, "Embedding": 2}),
    "GPT-2, checkpointed": Case(_checkpointed_gpt2, WORDS, {"GPT2Block": 3, "Conv1D": 12, "LayerNorm": 7}),
    # Six linear layers per block, one before and one in the decoder.
    "BERT": Case(_bert, WORDS, {"BertLayer": 3, "Linear": 20, "Embedding": 3}),
    # Encoder blocks have four projections and two linear layers in the feed-forward part, decoder blocks eight and two.
    "T5": Case(_t5, WORDS, {"T5Block": 4, "Linear": 33}),
    # Six linear layers per block and the classifier.
    "ViT": Case(_vit, LABELLED, {"ViTLayer": 3, "Linear": 19, "Conv2d": 1}),
    # The stem, two per block, and a shortcut for each change of channels or resolution.
    "ResNet": Case(_resnet, LABELLED, {"ResNetBasicLayer": 3, "Linear": 1}),
    # Four projections and three of the gated feed-forward part per block, and the head.
    "Llama": Case(
        partial(_made, "LlamaForCausalLM", **TINY, num_key_value_heads=1, pad_token_id=0),
        WORDS,
        {"LlamaDecoderLayer": 2, "Linear": 15, "LlamaRMSNorm": 5},
    ),
    # A mixture of experts; each token uses two.
    "Mixtral": Case(
        partial(_made, "MixtralForCausalLM", **TINY, num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2),
        WORDS,
        {"MixtralDecoderLayer": 2, "MixtralRMSNorm": 5},
    ),
    # Six linear layers per block and two in the head.
    "DistilBERT": Case(
        partial(_made, "DistilBertForMaskedLM", vocab_size=20, dim=8, n_layers=2, n_heads=2, hidden_dim=16),
        WORDS,
        {"TransformerBlock": 2, "Linear": 14, "LayerNorm": 6},
    ),
    "RoBERTa": Case(
        partial(_made, "RobertaForMaskedLM", **TINY, pad_token_id=0),
        WORDS,
        {"RobertaLayer": 2, "Linear": 14, "Embedding": 3},
    ),
    # One layer, called three times with six linear layers each; one before it and two in the head.
    "ALBERT": Case(
        partial(_made, "AlbertForMaskedLM", **{**TINY, "num_hidden_layers": 3}, embedding_size=4),
        WORDS,
        {"AlbertLayer": 3, "Linear": 21},
    ),
    # Six linear layers in the encoder, ten in the decoder, and the head.
    "BART": Case(
        partial(_made, "BartForConditionalGeneration", **TINY_PAIR, max_position_embeddings=16),
        WORDS,
        {"BartEncoderLayer": 1, "BartDecoderLayer": 1, "Linear": 17, "LayerNorm": 7},
    ),
    "Whisper": Case(
        partial(
            _made,
            "WhisperForConditionalGeneration",
            **TINY_PAIR,
            num_mel_bins=4,
            max_source_positions=8,
            max_target_positions=8,
        ),
        {"input_features": SPECTRA, "labels": TOKENS},
        {"WhisperEncoderLayer": 1, "WhisperDecoderLayer": 1, "Linear": 17, "Conv1d": 2},
    ),
    # Six linear layers per block, the projection of the features and the head.
    "Wav2Vec2": Case(
        partial(
            _made,
            "Wav2Vec2ForCTC",
            **TINY,
            conv_dim=(8, 8),
            conv_stride=(4, 2),
            conv_kernel=(8, 3),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            mask_time_prob=0.0,
            pad_token_id=0,
        ),
        {"input_values": SOUNDS, "labels": TOKENS},
        {"Wav2Vec2EncoderLayer": 2, "Linear": 14, "Conv1d": 2},
    ),
    # Six linear layers per block of both encoders, and the two projections.
    "CLIP": Case(
        _clip,
        {"input_ids": TOKENS, "pixel_values": PICTURES, "return_loss": True},
        {"CLIPEncoderLayer": 4, "Linear": 26, "Conv2d": 1},
    ),
    # Two linear layers and a convolution per block, the patches, one reduction, and the classifier.
    "ConvNeXt": Case(
        partial(
            _made,
            "ConvNextForImageClassification",
            hidden_sizes=[4, 8],
            depths=[1, 1],
            num_stages=2,
            drop_path_rate=0.1,
        ),
        LABELLED,
        {"ConvNextLayer": 2, "Linear": 5, "Conv2d": 4},
    ),
    # Six linear layers per block, one that merges patches, and the classifier.
    "Swin": Case(
        partial(
            _made,
            "SwinForImageClassification",
            image_size=32,
            patch_size=4,
            embed_dim=4,
            depths=[2, 1],
            num_heads=[1, 2],
            window_size=4,
        ),
        LABELLED,
        {"SwinLayer": 3, "Linear": 20, "Conv2d": 1},
    ),
    # Without the CUDA kernel, the loop over time is unrolled.
    "Mamba": Case(
        partial(_made, "MambaForCausalLM", vocab_size=20, hidden_size=8, state_size=4, num_hidden_layers=2),
        WORDS,
        {"MambaMixer": 2, "MambaRMSNorm": 3, "Embedding": 1},
    ),
    # Boxes are assigned to queries outside of torch, without a gradient.
    "DETR": Case(
        _detr,
        {"pixel_values": PICTURES, "labels": [BOXES, BOXES]},
        {"DetrEncoderLayer": 1, "DetrDecoderLayer": 1, "ResNetBasicLayer": 2},
    ),
}


def _step(model: nn.Module, batch: Mapping[str, Any], *, captured: bool) -> tuple[dict[str, Tensor], Graph | None]:
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


# Older releases of transformers do not have the new name of the method.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_transformers_model(case: Case) -> None:
    """A model of transformers is recorded call by call, from batch to loss, and trains as without a capture."""
    torch.manual_seed(0)
    model = case.make()
    expected, _ = _step(model, case.batch, captured=False)
    seen, graph = _step(model, case.batch, captured=True)
    assert {"loss"} < expected.keys() == seen.keys()
    assert [name for name in expected if not torch.equal(expected[name], seen[name])] == []
    assert graph is not None
    counted = [node.type_name for node in graph.module_calls()]
    assert {name: counted.count(name) for name in case.calls} == case.calls
    (backward,) = (node for node in graph.nodes if node.kind == "backward")
    leading = sources_of(graph, backward.id)
    inputs = [node.id for node in graph.nodes if node.kind == "input"]
    # An argument that is given twice is one input.
    assert len(inputs) == len({id(tensor) for _, tensor in iter_tensors(case.batch)})
    assert set(inputs) <= leading
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    parameters = {graph[each].name for each in leading if graph[each].kind == "parameter"}
    assert parameters & trained == expected.keys() - {"loss"}


def _around(graph: Graph, node: int) -> str:
    """Return the name of the call that contains a node."""
    return next(graph.ancestors(graph[node])).name


def _generate(net: Any, tokens: Tensor) -> Any:
    first = net.model(tokens, use_cache=True)
    word = first.logits[:, -1:].argmax(-1)
    return net.model(word, past_key_values=first.past_key_values, use_cache=True).logits


def test_key_value_cache() -> None:
    """Between two decoding steps only the keys and values of each layer are passed on, through the cache."""
    model = Net(_generate, model=_gpt2()).eval()
    with torch.no_grad():
        graph = capture_graph(model, TOKENS)

    def step(node: Node) -> int:
        """Return the number of the enclosing call of the model, 0 if there is none."""
        return next((each.call for each in graph.ancestors(node) if each.name == "model"), 0)

    between = Counter(
        (_around(graph, edge.source), _around(graph, edge.target))
        for edge in graph.edges
        if (step(graph[edge.source]), step(graph[edge.target])) == (1, 2) and graph[edge.source].kind == "op"
    )
    attentions = [f"model.transformer.h.{layer}.attn" for layer in range(3)]
    assert between == {(name, name): 2 for name in attentions}
    assert sources_of(graph, graph.nodes[-1].id) >= {only(graph, "argmax").id}
