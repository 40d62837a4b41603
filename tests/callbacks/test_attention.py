"""Heads and experts are in the records of a fit, which read back as they were, and their faults are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_recorder import ActivationRecorder, GraphRecorder, MemorySink, Outputs, ParameterRecorder, open_recording
from lightning_recorder.functions import ChosenFunctions
from lightning_recorder.insight import RULES
from lightning_recorder.records.parts import EXPERT_STATISTICS, HEAD_STATISTICS
from lightning_recorder.taps import Site

WIDTH, HEADS, LENGTH, TOKENS = 16, 4, 12, 20
OWN = {rule.name for rule in RULES if rule.function.__module__.rpartition(".")[2] in ("attention", "experts")}


class Attention(nn.Module):
    """Causal attention, with a fault."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.fault = fault
        if fault == "dead head":
            for each in (self.value.weight, self.value.bias):
                nn.init.zeros_(each[4:8])
                each.register_hook(lambda gradient: torch.cat([gradient[:4], gradient[4:8] * 0, gradient[8:]]))
        if fault in ("no scale", "times 25"):
            for each in (self.query.weight, self.key.weight):
                nn.init.normal_(each, std=2 * WIDTH**-0.5)

    def heads(self, layer: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return found

    def forward(self, x: Tensor) -> Tensor:
        key = self.query if self.fault == "equal projections" else self.key
        query, keys, value = self.heads(self.query, x), self.heads(key, x), self.heads(self.value, x)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        if self.fault == "inverted mask":
            mask = ~mask
        if self.fault == "shifted mask":
            mask = mask.tril(-1)
            mask[0, 0] = True
        if self.fault == "open mask":
            mask = torch.ones_like(mask)
        if self.fault == "scaled twice":
            query = query * 0.5  # 1 / √4
        if self.fault == "times 25":
            query = query * 25
        if self.fault == "wrong dimension":
            scores = (query @ keys.mT / 2).masked_fill(~mask, -1e9)
            mixed: Tensor = scores.softmax(-2) @ value
            return mixed.transpose(1, 2).flatten(-2)
        scale = 1.0 if self.fault == "no scale" else None
        found: Tensor = F.scaled_dot_product_attention(query, keys, value, mask, scale=scale)
        return found.transpose(1, 2).flatten(-2)


class Experts(nn.Module):
    """Chooses two of six experts for each token, with a fault."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 6)
        self.weight = nn.Parameter(torch.randn(6, WIDTH, WIDTH) / WIDTH**0.5)
        if fault == "collapse":
            nn.init.constant_(self.gate.bias[1:3], 20.0)
        if fault == "starved":
            nn.init.constant_(self.gate.bias[4:5], -20.0)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        made = torch.einsum("bti,eio->bteo", x, self.weight)
        found: Tensor = made.gather(2, chosen[..., None].expand(*chosen.shape, WIDTH)) * weights[..., None]
        return found.sum(2)


class Over(nn.Module):
    """A normalization of another dimension than the features."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(self.dim, keepdim=True)) / x.std(self.dim, keepdim=True)


def norm(fault: str) -> nn.Module:
    return {"norm over positions": Over(1), "norm over samples": Over(0)}.get(fault) or nn.LayerNorm(WIDTH)


class Model(LightningModule):
    """Predicts the next token of a sequence. The fault is that of the third of four layers, or of all."""

    def __init__(self, fault: str = "", *, everywhere: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH) / 4)
        faults = [fault if everywhere or layer == 2 else "" for layer in range(4)]
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": norm(each), "attn": Attention(each), "mlp": Experts(each)}) for each in faults
        )
        self.head = nn.Linear(WIDTH, TOKENS)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.tokens(batch) + self.places
        for block in cast("list[dict[str, nn.Module]]", self.blocks):
            x = x + block["attn"](block["norm"](x))
            x = x + block["mlp"](F.layer_norm(x, x.shape[-1:]))
        logits = self.head(x)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def fit(folder: Path, model: LightningModule, *more: Callback, **options: Any) -> ActivationRecorder:
    """Train for ten steps and record every second one."""
    outputs = Outputs(plots=False, dumps=False)
    recorder = ActivationRecorder(every_n_train_steps=2, outputs=outputs, sinks=[MemorySink()], strict=True)
    tokens = options.pop("tokens", None)
    if tokens is None:
        tokens = torch.randint(0, TOKENS, (160 * options.get("accumulate_grad_batches", 1), LENGTH))
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[recorder, GraphRecorder(formats=()), *more],
        **options,
    )
    trainer.fit(model, DataLoader(tokens, batch_size=16))
    return recorder


def test_records_have_heads_and_experts(tmp_path: Path) -> None:
    """Each attention and each router has vectors in the records, which read back from the file to the bit."""
    seed_everything(0, verbose=False)
    recorder = fit(tmp_path, Model(), accumulate_grad_batches=2)
    attention, router = (
        Site(f"blocks.1.{name}", "in.scores") for name in ("attn.scaled_dot_product_attention", "mlp.topk")
    )
    assert recorder.latest is not None
    for site, names, size in ((attention, HEAD_STATISTICS, HEADS), (router, EXPERT_STATISTICS, 6)):
        vectors = recorder.latest[site].tensors
        assert tuple(vectors) == names
        assert all(each.shape == (size,) for each in vectors.values())
        series = open_recording(tmp_path)["activations"]
        read = series[site].vectors(series.steps[-1])
        assert all(torch.equal(read[name].nan_to_num(), vectors[name].nan_to_num()) for name in names)
    # Both batches of a step count.
    assert recorder.latest[router].tensors["router_tokens"].tolist() == [2 * 16 * LENGTH] * 6
    assert recorder.latest[Site("cross_entropy", "in.target.next")].mean == 1.0


@pytest.mark.parametrize(
    ("fault", "everywhere", "rule", "place", "parts"),
    [
        ("dead head", False, "dead-heads", "head 1 of blocks.2.attn", (1,)),
        ("inverted mask", False, "mask-inverted", "blocks.2.attn", ()),
        ("inverted mask", True, "mask-inverted", "blocks.0.attn", ()),
        ("open mask", False, "sees-later-keys", "blocks.2.attn", ()),
        ("shifted mask", False, "own-key-hidden", "blocks.2.attn", ()),
        ("norm over samples", True, "mixes-tokens", "blocks.0.norm", ()),
        ("norm over positions", True, "mixes-tokens", "blocks.0.norm", ()),
        ("open mask", True, "attends-the-target", "blocks.3.attn", ()),
        ("equal projections", False, "equal-query-and-key", "blocks.2.attn", ()),
        ("no scale", True, "attention-scale", "blocks.0.attn", ()),
        ("times 25", False, "attention-scale", "blocks.2.attn", ()),
        ("scaled twice", True, "attention-scale", "blocks.0.attn", ()),
        ("wrong dimension", True, "attention-over-queries", "blocks.0.attn", ()),
        ("collapse", False, "router-collapse", "blocks.2.mlp", (1, 2)),
        ("starved", False, "starved-expert", "expert 4 of blocks.2.mlp", (4,)),
    ],
)
def test_faults_are_named(
    tmp_path: Path, fault: str, everywhere: bool, rule: str, place: str, parts: tuple[int, ...]
) -> None:
    """The first finding about attention or experts names the fault with its layer, and its head or expert."""
    seed_everything(0, verbose=False)
    fit(tmp_path, Model(fault, everywhere=everywhere))
    found = [each for each in open_recording(tmp_path).findings if each.rule in OWN]
    assert found, fault
    assert found[0].rule == rule
    assert place in found[0].verdict
    assert found[0].module.startswith(place.rpartition(" ")[2])
    assert tuple(sorted(found[0].parts)) == parts


def test_a_healthy_model_is_silent(tmp_path: Path) -> None:
    """The repaired twin of all faults has no finding about attention or experts, not even a note."""
    seed_everything(0, verbose=False)
    fit(tmp_path, Model())
    assert [each for each in open_recording(tmp_path).findings if each.rule in OWN] == []


class OfTokens(nn.Linear):
    """A linear layer that takes all tokens in one dimension, as those of GPT-2 do."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name in nn.Linear
        found = torch.addmm(self.bias, input.reshape(-1, input.shape[-1]), self.weight.T)
        return found.view(*input.shape[:-1], -1)


@pytest.mark.parametrize("fault", ["norm over samples", ""])
def test_means_over_samples_are_found_before_layers_that_join_the_tokens(tmp_path: Path, fault: str) -> None:
    """The stream of the tokens then has two dimensions in the layers, and three in the means."""
    seed_everything(0, verbose=False)
    model = Model(fault, everywhere=True)
    for name, module in list(model.blocks.named_modules()):
        if isinstance(module, nn.Linear):
            model.blocks.set_submodule(name, OfTokens(module.in_features, module.out_features))
    fit(tmp_path, model)
    found = [each.module for each in open_recording(tmp_path).findings if each.rule == "mixes-tokens"]
    assert found == ["blocks.0.norm"] * (fault != "")


class Rotary(nn.Module):
    """Returns the factors of a rotary embedding."""

    def forward(self, places: Tensor) -> tuple[Tensor, Tensor]:
        angles = places[..., None] * torch.arange(1, WIDTH + 1) / 10
        return angles.cos(), angles.sin()


class Placed(LightningModule):
    """A model whose tokens have positions, with a fault."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.tokens, self.head = fault, nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.positions, self.rotary = nn.Embedding(LENGTH + 8, WIDTH), Rotary()
        if fault == "zeros":
            self.positions.weight = nn.Parameter(torch.zeros(LENGTH + 8, WIDTH), requires_grad=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        places = torch.arange(LENGTH).expand(len(batch), LENGTH)
        one = torch.zeros_like(places)
        added = one if self.fault == "same row" else places
        if self.fault == "row of the sample":
            added = torch.arange(len(batch))[:, None].expand(-1, LENGTH)
        cos, sin = self.rotary(one if self.fault == "same factors" else places)
        x = self.tokens(batch) + self.positions(added)
        return F.cross_entropy(self.head(x * cos + x.roll(1, -1) * sin).flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


@pytest.mark.parametrize(
    ("fault", "place", "what"),
    [
        ("", "", ""),
        ("same factors", "rotary", "is the same for all 12 positions: 1 and 0"),
        ("zeros", "positions", "is the same for all 12 positions: 0"),
        ("same row", "positions", "a single row of positions has a gradient"),
        ("row of the sample", "positions", "is the same for all 12 positions of a sample"),
    ],
)
def test_positions_that_are_all_alike(tmp_path: Path, fault: str, place: str, what: str) -> None:
    """A rotary embedding of constant factors, and an embedding with one row for each sample or for all, are named."""
    seed_everything(0, verbose=False)
    fit(tmp_path, Placed(fault), ParameterRecorder(every_n_train_steps=2))
    found = [each for each in open_recording(tmp_path).findings if each.rule == "constant-positions"]
    assert [each.module for each in found] == [place] * bool(fault)
    assert all(what in each.verdict for each in found)


class Joined(LightningModule):
    """A layer whose queries, keys and values, or whose gates, come from one weight, of which rows stay zero."""

    def __init__(self, kind: str, rows: slice) -> None:
        super().__init__()
        self.fc, self.kind = nn.Linear(4, WIDTH), kind
        if kind == "gru":
            self.layer: nn.Module = nn.GRU(WIDTH, WIDTH, batch_first=True)
        elif kind == "torch":
            self.layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        else:
            self.layer = nn.Linear(WIDTH, 3 * WIDTH)
        name = {"gru": "weight_ih_l0", "torch": "in_proj_weight"}.get(kind, "weight")
        weight = self.layer.get_parameter(name)
        with torch.no_grad():
            weight[rows] = 0

        def kept(gradient: Tensor) -> Tensor:
            gradient = gradient.clone()
            gradient[rows] = 0
            return gradient

        weight.register_hook(kept)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.fc(batch)
        if self.kind == "gru":
            return self.layer(x)[0].square().mean()  # type: ignore[no-any-return]  # a module returns anything
        if self.kind == "torch":
            return self.layer(x, x, x)[0].square().mean()  # type: ignore[no-any-return]  # a module returns anything
        query, key, value = self.layer(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query = key if self.kind == "no queries" else query
        return F.scaled_dot_product_attention(query, key, value).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


@pytest.mark.parametrize(
    ("kind", "rows", "words"),
    [
        (
            "torch",
            slice(WIDTH),
            "a third of layer.in_proj_weight is zero in all of the last 3 records, as many weights as one",
        ),
        ("linear", slice(WIDTH, 3 * WIDTH), "two thirds of layer.weight is zero in all of the last 3 records"),
        ("no queries", slice(0), "a third of the gradient of layer.weight is zero in all of the last 3 records"),
        ("torch", slice(0), ""),
        ("torch", slice(WIDTH // 2), ""),
        ("linear", slice(0), ""),
        ("gru", slice(WIDTH), ""),
    ],
)
def test_a_projection_of_zeros(tmp_path: Path, kind: str, rows: slice, words: str) -> None:
    """As many zeros as a projection has, or its gradient, are named in attention; other shares and a GRU are not."""
    seed_everything(0, verbose=False)
    outputs = Outputs(plots=False, dumps=False)
    recorders = [each(every_n_train_steps=1, outputs=outputs) for each in (ActivationRecorder, ParameterRecorder)]
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        default_root_dir=tmp_path,
        enable_checkpointing=False,
        callbacks=[*recorders, GraphRecorder(formats=())],
        **options,
    )
    trainer.fit(Joined(kind, rows), DataLoader(torch.randn(32, 6, 4), batch_size=8))  # type: ignore[arg-type]  # a tensor is a data set
    found = [each.verdict for each in open_recording(tmp_path).findings if each.rule == "zero-projection"]
    assert len(found) == bool(words)
    assert all(each.startswith(words) for each in found)


class Texts(LightningModule):
    """A GPT-2 whose texts end with token 7, and are padded with it; the labels of some of these are -100."""

    def __init__(self, ignored: int) -> None:
        super().__init__()
        settings: dict[str, Any] = {
            "bos_token_id": 0,
            "eos_token_id": 7,
            "n_layer": 1,
            "n_head": 1,
            "n_embd": 8,
            "vocab_size": 9,
        }
        self.model, self.ignored = GPT2LMHeadModel(GPT2Config(n_positions=8, **settings)), ignored

    def training_step(self, tokens: Tensor, _: int) -> Tensor:
        labels = tokens.clone()
        labels[:, self.ignored :] = -100
        loss: Tensor = self.model(input_ids=tokens, labels=labels).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-3)


@pytest.mark.parametrize(("ignored", "rules"), [(4, ["no-end-as-target"]), (5, [])])
def test_end_tokens_that_are_ignored_as_padding(tmp_path: Path, ignored: int, rules: list[str]) -> None:
    """Texts of four tokens end at the fifth one: if its label is ignored, too, the model cannot learn to end."""
    tokens = torch.cat([torch.randint(1, 7, (160, 4)), torch.full((160, 4), 7)], 1)
    fit(tmp_path, Texts(ignored), tokens=tokens)
    found = [each.rule for each in open_recording(tmp_path).findings if "end" in each.rule]
    assert found == rules


def test_no_code_of_a_configuration_runs() -> None:
    """The end token is read from what a model stores; a property may draw numbers."""
    read = []

    class Drawing(nn.Linear):
        @property
        def config(self) -> Any:
            read.append(torch.rand(1))

    assert ChosenFunctions(Drawing(2, 2), ("cross_entropy",)).end_token is None
    assert read == []


def test_attention_can_be_left_out() -> None:
    """A name or ``functions=False`` leaves the heads out."""
    model = Model()
    chosen = ChosenFunctions(model, ActivationRecorder().functions, exclude=["**.topk"])
    attention, router = model.blocks[0]["attn"], model.blocks[0]["mlp"]  # type: ignore[index]  # a ModuleDict
    assert chosen.name_of_scores(attention, "scaled_dot_product_attention", 1)
    assert not chosen.name_of_scores(router, "topk", 1)
    assert not ChosenFunctions(model, ()).name_of_scores(router, "topk", 1)
