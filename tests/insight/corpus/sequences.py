"""Healthy tasks on sequences; each one learns."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.insight.corpus.nets import Attention, Block, Recurrent, Seq2Seq
from tests.insight.corpus.task import Task, adam, healthy, random, warm


def sequences(step: int, size: int = 32, length: int = 12) -> tuple[Tensor, Tensor]:
    """Return series, ``[size, length, 4]``, and a class: the channel with the largest sum."""
    series = torch.randn(size, length, 4, generator=random(step))
    return series, series.sum(1).argmax(1)


@healthy
def lstm() -> Task:
    return Task(Recurrent(nn.LSTM), sequences, optimizer=adam(5e-3), trainer={"gradient_clip_val": 1.0})


@healthy
def gru_bidirectional() -> Task:
    return Task(Recurrent(nn.GRU, bidirectional=True, layers=2), sequences, optimizer=adam(3e-3))


@healthy
def seq2seq() -> Task:
    return Task(Seq2Seq(), tokens, lambda net, got: copy_loss(net(got, got), got), optimizer=adam(5e-3))


def tokens(step: int, size: int = 16, length: int = 12) -> Tensor:
    """Return periodic sequences of tokens, ``[size, length]``, which are predictable from their beginning."""
    start = torch.randint(0, 30, (size, 1), generator=random(step))
    stride = torch.randint(1, 4, (size, 1), generator=random(step + 7))
    return (start + stride * torch.arange(length)) % 30


def copy_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())


def next_loss(net: Any, got: Tensor) -> Tensor:
    logits = net(got)
    return copy_loss(getattr(logits, "logits", logits)[:, :-1], got[:, 1:])


def encoder(layers: int = 3, norm_first: bool = False) -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True, norm_first=norm_first)
    return nn.Sequential(
        OrderedDict(
            embed=nn.Embedding(30, 32),
            encoder=nn.TransformerEncoder(layer, layers, enable_nested_tensor=False),
            head=nn.Linear(32, 30),
        )
    )


@healthy
def transformer_encoder() -> Task:
    def loss(net: nn.Module, got: Tensor) -> Tensor:
        return copy_loss(net(got), got.flip(1))

    return Task(encoder(), tokens, loss, optimizer=adam(2e-3))


def transformer(blocks: int = 4, **options: Any) -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            embed=nn.Embedding(30, 32),
            blocks=nn.Sequential(*(Block(32, **options) for _ in range(blocks))),
            norm=nn.LayerNorm(32),
            head=nn.Linear(32, 30),
        )
    )


@healthy
def transformer_causal() -> Task:
    return Task(transformer(), tokens, next_loss, optimizer=adam(3e-3, weight_decay=0.1), schedule=warm)


@healthy
def transformer_bf16() -> Task:
    return Task(
        transformer(6), tokens, next_loss, optimizer=adam(2e-3), schedule=warm, trainer={"precision": "bf16-mixed"}
    )


@healthy
def gpt2() -> Task:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=30, n_positions=16, n_embd=32, n_layer=3, n_head=4, use_cache=False)
    return Task(
        GPT2LMHeadModel(config),
        tokens,
        next_loss,
        optimizer=adam(2e-3, weight_decay=0.01),
        schedule=warm,
        trainer={"gradient_clip_val": 1.0},
    )


def bert_net() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    options: Any = {"num_labels": 3}  # not in the annotations
    config = BertConfig(
        vocab_size=30,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=16,
        initializer_range=0.1,  # for 32 channels; the default suits 768
        **options,
    )
    return BertForSequenceClassification(config)


def starts(step: int) -> tuple[Tensor, Tensor]:
    """Return periodic sequences and the class of their first token."""
    got = tokens(step)
    return got, got[:, 0] // 10


def bert_loss(net: Any, got: Any) -> Tensor:
    return F.cross_entropy(net(got[0]).logits, got[1])


@healthy
def bert() -> Task:
    return Task(bert_net(), starts, bert_loss, optimizer=adam(1e-3), schedule=warm)


@healthy
def bert_frozen_embeddings() -> Task:
    """Fine-tuning with a small learning rate; the embeddings and the first layer are frozen."""
    net = bert_net()
    for part in (net.bert.embeddings, net.bert.encoder.layer[0]):
        part.requires_grad_(False)
    return Task(net, starts, bert_loss, optimizer=adam(3e-4, weight_decay=0.01), schedule=warm)


@healthy
def attention_pooling() -> Task:
    """One layer of attention with a softmax module over a series."""

    class Pooling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(4, 32)
            self.attention = Attention(32, 4, causal=False)
            self.norm = nn.LayerNorm(32)
            self.head = nn.Linear(32, 4)

        def forward(self, series: Tensor) -> Tensor:
            hidden = self.project(series)
            out: Tensor = self.head(self.norm(hidden + self.attention(hidden)).mean(1))
            return out

    return Task(Pooling(), sequences, optimizer=adam(3e-3))
