"""Small models of many architectures, with a batch for each."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from typing_extensions import override

from tests.graph.nets import Net, linear

__all__ = ["ARCHITECTURES", "Case", "NormWithActivation", "UNet"]

Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
TOKENS = torch.tensor([[5, 3, 9, 1], [2, 7, 7, 4]])
IMAGE = torch.zeros(1, 3, 16, 16)
ROWS = torch.zeros(2, 16)
STEPS = torch.zeros(2, 3, 16)

_TEXT: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION = {**{key: _TEXT[key] for key in list(_TEXT)[1:5]}, "image_size": 16, "patch_size": 8}


class UNet(nn.Module):
    """Halves an image at each level and doubles it again, with a connection between the two halves of each level."""

    def __init__(self, channels: tuple[int, ...] = (4, 8, 16)) -> None:
        super().__init__()
        self.first = _double(3, channels[0])
        pairs = list(pairwise(channels))
        self.down = nn.ModuleList(_double(low, high) for low, high in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(high, low, 2, 2) for low, high in reversed(pairs))
        self.merge = nn.ModuleList(_double(2 * low, low) for low, _ in reversed(pairs))
        self.last = nn.Conv2d(channels[0], 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        levels = [self.first(x)]
        for down in self.down:
            levels.append(down(F.max_pool2d(levels[-1], 2)))
        x = levels.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([levels.pop(), up(x)], 1))
        out: Tensor = self.last(x)
        return out


def _double(inputs: int, outputs: int) -> nn.Module:
    parts = [part for start in (inputs, outputs) for part in _convolution(start, outputs)]
    return nn.Sequential(*parts)


def _convolution(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]


class NormWithActivation(nn.BatchNorm2d):
    """A layer that calls others, although it has weights and running statistics itself."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.drop, self.act = nn.Identity(), nn.ReLU()

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.drop(super().forward(x)))
        return y


def _tied() -> nn.Module:
    net: Any = Net(lambda net, tokens: net.head(net.body(net.table(tokens))), table=nn.Embedding(20, 4), body=linear())
    net.head = nn.Linear(4, 20, bias=False)
    net.head.weight = net.table.weight
    return net  # type: ignore[no-any-return]  # the attributes of a Net are not declared


def _listed() -> nn.Module:
    net: Any = Net(lambda net, x: x * net.scales[0] + net.scales[1] * net.named["bias"], fc=nn.Linear(16, 16))
    net.scales = nn.ParameterList([nn.Parameter(torch.ones(16)) for _ in range(2)])
    net.named = nn.ParameterDict({"bias": nn.Parameter(torch.ones(16)), "other": nn.Parameter(torch.ones(3))})
    return net  # type: ignore[no-any-return]  # the attributes of a Net are not declared


def _experts() -> nn.Module:
    experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
    return Net(lambda net, x: F.linear(net.experts[1](x), net.e.weight), experts=experts, e=nn.Linear(16, 16))


def _heads() -> nn.Module:
    heads = nn.ModuleList(nn.Linear(16, 1 + width) for width in range(40))
    return Net(lambda net, x: torch.cat([head(x) for head in net.heads], 1), heads=heads)


def _of(model: Any, config: Any, *batch: Any, **keywords: Any) -> Callable[[], Case]:
    return lambda: (model(config), batch, keywords)


def _plain(make: Callable[[], nn.Module], *batch: Any) -> Callable[[], Case]:
    return lambda: (make(), batch, {})


_WORDS = {"input_ids": TOKENS}
_ATTENTION: dict[str, Any] = {"num_layers": 2, "num_heads": 2, "d_model": 8, "d_kv": 4, "d_ff": 16, "vocab_size": 20}
_SEQ2SEQ: dict[str, Any] = {
    "vocab_size": 20,
    "d_model": 8,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_PAIR = {"input_ids": TOKENS, "decoder_input_ids": TOKENS}

ARCHITECTURES: dict[str, Callable[[], Case]] = {
    "MLP": _plain(lambda: nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2)), ROWS),
    "chain of 30": _plain(lambda: nn.Sequential(*(nn.Linear(16 + at, 17 + at) for at in range(30))), ROWS),
    "40 heads": _plain(_heads, ROWS),
    "U-Net": _plain(UNet, IMAGE),
    "norm with activation": _plain(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), NormWithActivation(4)), IMAGE),
    "attention": lambda: (nn.MultiheadAttention(16, 2), (STEPS, STEPS, STEPS), {}),
    "encoder layer": _plain(lambda: nn.TransformerEncoderLayer(16, 2, 32), STEPS),
    "encoder": _plain(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3), STEPS),
    "decoder layer": _plain(lambda: nn.TransformerDecoderLayer(16, 2, 32), STEPS, STEPS),
    "transformer": _plain(lambda: nn.Transformer(16, 2, 2, 2, 32, batch_first=True), STEPS, STEPS),
    "LSTM": _plain(lambda: nn.LSTM(16, 4, 2, bidirectional=True), STEPS),
    "GRU cell": _plain(lambda: nn.GRUCell(16, 4), ROWS),
    "bilinear": _plain(lambda: nn.Bilinear(16, 16, 3), ROWS, ROWS),
    "weight norm": _plain(lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(16, 3))), ROWS),
    "lazy": _plain(lambda: nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d()), ROWS),
    "tied pair": _plain(_tied, TOKENS),
    "lists of parameters": _plain(_listed, ROWS),
    "experts that are not called": _plain(_experts, ROWS),
    "shared layer": _plain(lambda: Net(lambda net, x: net.fc(net.fc(x)), fc=nn.Linear(16, 16)), ROWS),
    "GPT-2": _of(
        hf.GPT2LMHeadModel,
        hf.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2),
        **_WORDS,
    ),
    "BERT": _of(hf.BertForMaskedLM, hf.BertConfig(**_TEXT), **_WORDS),
    "RoBERTa": _of(hf.RobertaModel, hf.RobertaConfig(**_TEXT), **_WORDS),
    "ALBERT": _of(hf.AlbertModel, hf.AlbertConfig(**{**_TEXT, "embedding_size": 4}), **_WORDS),
    "ELECTRA": _of(hf.ElectraModel, hf.ElectraConfig(**{**_TEXT, "embedding_size": 4}), **_WORDS),
    "DistilBERT": _of(
        hf.DistilBertModel, hf.DistilBertConfig(vocab_size=20, dim=8, n_layers=2, n_heads=2, hidden_dim=16), **_WORDS
    ),
    "Llama": _of(hf.LlamaForCausalLM, hf.LlamaConfig(**_TEXT), **_WORDS),
    "Mistral": _of(hf.MistralForCausalLM, hf.MistralConfig(**_TEXT, num_key_value_heads=1), **_WORDS),
    "Qwen 2": _of(hf.Qwen2ForCausalLM, hf.Qwen2Config(**_TEXT, num_key_value_heads=1), **_WORDS),
    "Gemma": _of(hf.GemmaForCausalLM, hf.GemmaConfig(**_TEXT, num_key_value_heads=1, head_dim=4), **_WORDS),
    "Mixtral": _of(
        hf.MixtralForCausalLM, hf.MixtralConfig(**_TEXT, num_key_value_heads=1, num_local_experts=4), **_WORDS
    ),
    "GPT-NeoX": _of(hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig(**_TEXT), **_WORDS),
    "OPT": _of(
        hf.OPTForCausalLM,
        hf.OPTConfig(**{**_TEXT, "ffn_dim": 16, "word_embed_proj_dim": 8, "max_position_embeddings": 16}),
        **_WORDS,
    ),
    "T5": _of(hf.T5ForConditionalGeneration, hf.T5Config(**_ATTENTION), **_PAIR),
    "BART": _of(hf.BartForConditionalGeneration, hf.BartConfig(**_SEQ2SEQ, max_position_embeddings=8), **_PAIR),
    "Whisper": _of(
        hf.WhisperModel,
        hf.WhisperConfig(**_SEQ2SEQ, num_mel_bins=4, max_source_positions=8, max_target_positions=8),
        input_features=torch.zeros(2, 4, 16),
        decoder_input_ids=TOKENS,
    ),
    "Mamba": _of(
        hf.MambaForCausalLM,
        hf.MambaConfig(vocab_size=20, hidden_size=8, num_hidden_layers=2, state_size=4),
        **_WORDS,
    ),
    "ViT": _of(hf.ViTForImageClassification, hf.ViTConfig(**_VISION), IMAGE),
    "DeiT": _of(hf.DeiTModel, hf.DeiTConfig(**_VISION), IMAGE),
    "CLIP": _of(
        hf.CLIPModel,
        hf.CLIPConfig(
            text_config={**_TEXT, "max_position_embeddings": 8}, vision_config=dict(_VISION), projection_dim=8
        ),
        **_WORDS,
        pixel_values=torch.zeros(2, 3, 16, 16),
    ),
    "ResNet": _of(
        hf.ResNetForImageClassification,
        hf.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8, 16], depths=[2, 2, 2], layer_type="basic"),
        torch.zeros(2, 3, 32, 32),
    ),
    "ConvNeXt": _of(
        hf.ConvNextForImageClassification,
        hf.ConvNextConfig(hidden_sizes=[4, 8, 12, 16], depths=[1, 1, 2, 1]),
        torch.zeros(1, 3, 32, 32),
    ),
    "DPT": _of(
        hf.DPTForDepthEstimation,
        hf.DPTConfig(
            image_size=32,
            patch_size=8,
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=37,
            backbone_out_indices=[0, 1, 2, 3],
            neck_hidden_sizes=[8, 8, 16, 16],
            fusion_hidden_size=16,
        ),
        pixel_values=torch.zeros(1, 3, 32, 32),
    ),
    "Swin": _of(
        hf.SwinModel,
        hf.SwinConfig(image_size=32, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4),
        torch.zeros(1, 3, 32, 32),
    ),
    "MobileNet V2": _of(hf.MobileNetV2Model, hf.MobileNetV2Config(depth_multiplier=0.2), torch.zeros(2, 3, 32, 32)),
}
