"""Rules about the blocks of transformers: missing residual connections, and activations unlike those of the others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recorder.graph import capture_graph
from lightning_recorder.insight import Finding
from tests.insight.records import Examination

OWN = ("no-residual", "odd-activation", "odd-attention", "added-twice", "one-sided-rotation", "one-sided-roll")


class Attention(nn.Module):
    def __init__(self, is_fused: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.is_fused = nn.Linear(16, 48), nn.Linear(16, 16), is_fused
        self.scale = 8**-0.5
        self.change: Callable[[Tensor], Tensor] = nn.Identity()
        self.change_keys: Callable[[Tensor], Tensor] | None = None
        self.change_values: Callable[[Tensor], Tensor] = nn.Identity()
        self.change_scores: Callable[[Tensor], Tensor] = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        q, k, v = self.change(q), (self.change_keys or self.change)(k), self.change_values(v)
        if self.is_fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        else:
            mixed = self.change_scores(q @ k.mT * self.scale).softmax(-1) @ v
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


class FeedForward(nn.Module):
    def __init__(self, is_gated: bool) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(16, 32), nn.Linear(16, 32) if is_gated else None
        self.down, self.act = nn.Linear(32, 16), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.act(self.up(x))
        out: Tensor = self.down(inner if self.gate is None else inner * self.gate(x))
        return out


class Block(nn.Module):
    """A block with the normalizations before or behind its layers."""

    def __init__(self, is_pre: bool, is_fused: bool, is_gated: bool, norm: type[nn.Module]) -> None:
        super().__init__()
        self.attn, self.mlp, self.is_pre = Attention(is_fused), FeedForward(is_gated), is_pre
        self.norm1, self.norm2 = norm(16), norm(16)
        self.adds = {"attn": True, "mlp": True}

    def forward(self, x: Tensor) -> Tensor:
        for name, norm in (("attn", self.norm1), ("mlp", self.norm2)):
            layer = getattr(self, name)
            out = layer(norm(x) if self.is_pre else x)
            x = x + out if self.adds[name] else out
            x = x if self.is_pre else norm(x)
        return x


class Written(nn.Module):
    """A root mean square norm that is written out."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class WrittenRMSNorm(Written):
    """The same, with a name that says so."""


class Standardized(Written):
    """A layer norm that is written out, with the mean and the variance as tensors of their own."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).square().mean(-1, keepdim=True)
        return self.weight * (x - mean) / torch.sqrt(variance + 1e-5) + 0.1


class OverPositions(Written):
    """A layer norm that runs over the positions."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True) + 1e-5).sqrt()


class Modulated(nn.Module):
    """A layer norm whose scale and shift follow from a condition, as in a DiT."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.condition = nn.Parameter(torch.randn(2, 1, size))
        self.make, self.norm = nn.Linear(size, 2 * size), nn.LayerNorm(size, elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self.make(self.condition).chunk(2, -1)
        return self.modulate(self.norm(x), scale, shift)

    def modulate(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return x * (1 + scale) + shift


class ModulatedInOne(Modulated):
    """The same in one call."""

    def modulate(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return torch.addcmul(shift, x, 1 + scale)


class Model(nn.Module):
    def __init__(self, blocks: int = 4, **options: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 16), nn.Linear(16, 11)
        self.blocks = nn.ModuleList([Block(**options) for _ in range(blocks)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


PRE: dict[str, Any] = {"is_pre": True, "is_fused": True, "is_gated": False, "norm": nn.LayerNorm}
KINDS: dict[str, dict[str, Any]] = {
    "gpt": PRE,
    "bert": {**PRE, "is_pre": False, "is_fused": False},
    "llama": {**PRE, "is_gated": True, "norm": WrittenRMSNorm},
    "named by its root": {**PRE, "norm": Written},
    "named by its mean": {**PRE, "is_fused": False, "norm": Standardized},
    "dit": {**PRE, "norm": Modulated},
    "dit with addcmul": {**PRE, "norm": ModulatedInOne},
}


def found(model: nn.Module) -> list[Finding]:
    examination = Examination(capture_graph(model, torch.arange(20).reshape(2, 10) % 11))
    return [each for each in examination.findings() if each.rule in OWN]


@pytest.mark.parametrize("kind", KINDS)
def test_healthy_blocks_are_silent(kind: str) -> None:
    """Residual connections are seen around normalizations before or behind a layer, also if they are written out."""
    assert found(Model(**KINDS[kind])) == []


class Rolled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.roll(2, 1)


def test_shifted_windows_hide_no_residual_connection() -> None:
    """Values that are moved to other places before the projections, as in a Swin, still come from the same tensor."""
    model = Model(**PRE)
    for block in model.blocks:
        block.norm1 = nn.Sequential(nn.LayerNorm(16), Rolled())
    assert found(model) == []
    blocks: Any = model.blocks
    blocks[1].adds["attn"] = False
    (finding,) = found(model)
    assert (finding.rule, finding.module) == ("no-residual", "blocks.1.attn")


class Detached(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


def test_a_detach_hides_no_residual_connection() -> None:
    """A layer whose input is detached has its residual connection; another rule names the detach."""
    model = Model(**PRE)
    blocks: Any = model.blocks
    blocks[1].norm2 = nn.Sequential(nn.LayerNorm(16), Detached())
    assert [each.rule for each in found(model)] == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("layer", "module"), [("attn", "blocks.1.attn"), ("mlp", "blocks.1.mlp.down")])
def test_a_missing_residual_connection_is_named(kind: str, layer: str, module: str) -> None:
    """One layer whose input nothing else reads is named."""
    model = Model(**KINDS[kind])
    model.blocks[1].adds[layer] = False  # type: ignore[operator,index]  # of a Block
    (finding,) = found(model)
    assert (finding.rule, finding.module) == ("no-residual", module)
    assert set(finding.others) <= {"blocks.1"}  # the block is unlike the others


class Disentangled(Attention):
    """Attention whose scores also depend on projections of the distances, as in DeBERTa."""

    def __init__(self) -> None:
        super().__init__(False)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.distances, self.of_distances = nn.Parameter(torch.randn(10, 16)), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, d = self.q(x), self.k(x), self.v(x), self.of_distances(self.distances)
        out: Tensor = self.out(((q @ k.mT + q @ d.mT) * self.scale).softmax(-1) @ v)
        return out


def test_scores_with_a_projection_of_distances_hide_no_missing_residual_connection() -> None:
    """A linear layer of position embeddings is none of queries, keys and values."""
    model = Model(**{**PRE, "is_pre": False})
    blocks: Any = model.blocks
    for block in blocks:
        block.attn = Disentangled()
    assert found(model) == []
    blocks[1].adds["attn"] = False
    assert [(each.rule, each.module) for each in found(model)] == [("no-residual", "blocks.1.attn")]


class _Masking(nn.Module):
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        masked: Tensor = self.norm(x) * self.mask
        return masked


class _Padded(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        mask = (tokens != 0).float()[..., None]
        for each in self.modules():
            if isinstance(each, _Masking):
                each.mask = mask
        return super().forward(tokens)


def test_a_mask_of_the_batch_is_no_residual_connection() -> None:
    """A layer whose input is multiplied with a mask of the padding is examined like any other."""
    model = _Padded(**PRE)
    blocks: Any = model.blocks
    for block in blocks:
        block.norm1 = _Masking()
    assert found(model) == []
    blocks[1].adds["attn"] = False
    assert [(each.rule, each.module) for each in found(model)] == [("no-residual", "blocks.1.attn")]


def test_a_stack_without_residual_connections_is_one_finding() -> None:
    """If no block has the connection, the first is named, with the others."""
    model = Model(blocks=2, **PRE)
    for block in model.blocks:
        block.adds["attn"] = False  # type: ignore[operator,index]  # of a Block
    (finding,) = found(model)
    assert (finding.module, finding.others) == ("blocks.0.attn", ("blocks.1.attn",))


def test_attention_of_one_layer_is_not_examined() -> None:
    """A single attention without a residual connection may pool a sequence."""
    model = Model(blocks=1, **PRE)
    model.blocks[0].adds["attn"] = False  # type: ignore[operator,index]  # of a Block
    assert found(model) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("act", [nn.Sigmoid, nn.Identity])
def test_another_activation_is_named(kind: str, act: Callable[[], nn.Module]) -> None:
    """One block with another activation than the three others is named, also without any."""
    model = Model(**KINDS[kind])
    model.blocks[2].mlp.act = act()  # type: ignore[union-attr]  # of a Block
    (finding,) = found(model)
    assert (finding.rule, finding.module) == ("odd-activation", "blocks.2.mlp.down")


def test_a_sigmoid_in_all_blocks_is_found_unless_it_is_a_gate() -> None:
    """A sigmoid is no activation of a feed-forward layer, but the gate of a gated one may be."""
    models = [Model(blocks=2, **KINDS[kind]) for kind in ("gpt", "llama")]
    for model in models:
        for block in model.blocks:
            block.mlp.act = nn.Sigmoid()  # type: ignore[union-attr]  # of a Block
    (finding,) = found(models[0])
    assert (finding.module, finding.others) == ("blocks.0.mlp.down", ("blocks.1.mlp.down",))
    assert found(models[1]) == []


def test_no_activation_in_any_block_is_found_unless_there_is_a_gate() -> None:
    """Two linear layers in a row are named in all blocks; the product of a gated one needs no activation."""
    models = [Model(blocks=2, **KINDS[kind]) for kind in ("gpt", "llama")]
    for model in models:
        for block in model.blocks:
            block.mlp.act = nn.Identity()  # type: ignore[union-attr]  # of a Block
    (finding,) = found(models[0])
    assert (finding.module, finding.others) == ("blocks.0.mlp.down", ("blocks.1.mlp.down",))
    assert finding.verdict == "the activation before blocks.0.mlp.down is missing, as in all 2 blocks"
    assert found(models[1]) == []


class Transposed(nn.Linear):
    """A linear layer that is written out with the transpose of its weight, as in Falcon."""

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.weight.T
        bias = self._parameters["bias"]
        return out if bias is None else out + bias


@pytest.mark.parametrize("bias", [True, False])
def test_layers_that_are_written_with_a_transposed_weight(bias: bool) -> None:
    """The missing activation between two of them is named; with it, they are silent."""
    model = Model(blocks=2, **PRE)
    for block in model.blocks:
        mlp: Any = block.mlp
        mlp.up, mlp.down = Transposed(16, 32, bias), Transposed(32, 16, bias)
    assert found(model) == []
    for block in model.blocks:
        block.mlp.act = nn.Identity()  # type: ignore[union-attr]  # of a Block
    (finding,) = found(model)
    assert (finding.rule, finding.module) == ("odd-activation", "blocks.0.mlp.down")


def test_two_kinds_of_activations_are_a_design() -> None:
    """With two of each kind, nothing is odd."""
    model = Model(**PRE)
    blocks: Any = model.blocks
    for block in blocks[1::2]:
        block.mlp.act = copy.deepcopy(nn.ReLU())
    assert found(model) == []


def with_values_times(times: float, kind: str = "gpt") -> Model:
    """Return a model that multiplies the values of all its attention layers, and their queries and keys by ten."""
    model = Model(**KINDS[kind])
    for block in model.blocks:
        block.attn.change = _Times()  # type: ignore[union-attr]  # of a Block
        block.attn.change_values = _Times(times)  # type: ignore[union-attr]  # likewise
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("times", [1.0, 2.0, 10.0, 0.1])
def test_values_times_a_constant_in_all_blocks(kind: str, times: float) -> None:
    """A large or small constant factor of the values is named although all blocks have it; keys may have one."""
    findings = found(with_values_times(times, kind))
    assert len(findings) == (times in (10.0, 0.1))
    for each in findings:
        assert each.rule == "odd-attention"
        words = f"the values of the attention blocks.0.attn are multiplied by {times:g}, as in all 4 blocks"
        assert each.verdict == words
        assert each.others == tuple(f"blocks.{place}.attn" for place in (1, 2, 3))


class _WithResidual(nn.Module):
    """A layer that adds its input to its output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.layer(x)
        return out


class _Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x


@pytest.mark.parametrize("places", [(), (1,), (0, 1, 2, 3)])
def test_two_residual_connections_around_one_layer(places: tuple[int, ...]) -> None:
    """A layer with a residual connection of its own in a block that has one is named, in one block and in all."""
    model = Model(**KINDS["bert"])
    for place in places:
        model.blocks[place].mlp = _WithResidual(model.blocks[place].mlp)  # type: ignore[arg-type]  # of a Block
    findings = [each for each in found(model) if each.rule == "added-twice"]
    assert [each.module for each in findings] == [f"blocks.{place}" for place in places[:1]]
    assert all({f"blocks.{place}" for place in places[1:]} <= set(each.others) for each in findings)


def test_a_tensor_that_is_added_to_itself() -> None:
    """A sum of a tensor with itself counts twice."""
    model = Model(**PRE)
    for block in model.blocks:
        block.norm2 = nn.Sequential(_Twice(), block.norm2)  # type: ignore[arg-type]  # of a Block
    (finding,) = found(model)
    assert (finding.rule, finding.module) == ("added-twice", "blocks.0.norm2.0")


class _Times(nn.Module):
    def __init__(self, times: float = 10) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        return x * self.times


class _Rotated(nn.Module):
    """Multiplies with a table that has a row for each position, or with one number for each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(10, width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.get_buffer("table") + x.roll(4, -1) * self.get_buffer("table")


@pytest.mark.parametrize(
    ("queries", "keys", "words"),
    [
        (_Rotated(8), nn.Identity(), "the queries of blocks.0.attn are multiplied with tensors of the positions"),
        (nn.Identity(), _Rotated(8), "the keys of blocks.0.attn are multiplied with tensors of the positions"),
        (_Rotated(8), _Rotated(8), ""),
        (nn.Identity(), _Rotated(1), ""),
        (_Times(), nn.Identity(), ""),
    ],
)
@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_rotary_positions_of_one_side(kind: str, queries: Any, keys: Any, words: str) -> None:
    """Tables of positions for queries or keys alone are named; masks of keys and factors of queries are not."""
    model = Model(**KINDS[kind])
    for block in model.blocks:
        block.attn.change, block.attn.change_keys = queries, keys  # type: ignore[union-attr]  # of a Block
    findings = [each for each in found(model) if each.rule == "one-sided-rotation"]
    assert [each.verdict.partition(",")[0] for each in findings] == [words] * bool(words)


class _Moved(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return x.roll(1, self.dim)


@pytest.mark.parametrize(
    ("queries", "keys", "values", "words"),
    [
        (nn.Identity(), nn.Identity(), _Moved(2), "the values of blocks.1.attn are rolled along the positions"),
        (_Moved(-2), nn.Identity(), nn.Identity(), "the queries of blocks.1.attn are rolled along the positions"),
        (nn.Identity(), _Moved(2), _Moved(2), "the keys and values of blocks.1.attn are rolled along the positions"),
        (nn.Identity(), nn.Identity(), _Moved(1), ""),
        (nn.Identity(), nn.Identity(), _Moved(-1), ""),
        (_Moved(2), _Moved(2), _Moved(2), ""),
    ],
)
@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_a_roll_of_one_side(kind: str, queries: Any, keys: Any, values: Any, words: str) -> None:
    """A roll along the positions of one or two sides of an attention is named; one along heads or features is not."""
    model = Model(**KINDS[kind])
    attention: Any = model.blocks[1].attn
    attention.change, attention.change_keys, attention.change_values = queries, keys, values
    findings = [each for each in found(model) if each.rule == "one-sided-roll"]
    assert [each.verdict.partition(",")[0] for each in findings] == [words] * bool(words)


@pytest.mark.parametrize(("blocks", "severity"), [(4, "note"), (3, "note"), (2, "")])
def test_one_of_a_few_blocks_with_attention(blocks: int, severity: str) -> None:
    """One of three blocks that calls something else is a note, as they may alternate; two blocks prove nothing."""
    model = Model(blocks=blocks, **PRE)
    model.blocks[1].mlp.down = nn.Sequential(model.blocks[1].mlp.down, nn.ReLU())  # type: ignore[union-attr,arg-type]  # of a Block
    examination = Examination(capture_graph(model, torch.arange(20).reshape(2, 10) % 11))
    odd = [each for each in examination.findings() if each.rule == "odd-block"]
    assert [(each.severity, each.module) for each in odd] == [(severity, "blocks.1.mlp.down")] * bool(severity)


def test_another_setting_in_one_of_a_few_blocks() -> None:
    """Another setting of the same calls is a finding; it is none in blocks without attention."""
    model = Model(blocks=4, **PRE)
    model.blocks[2].norm1.eps = 1e-2  # type: ignore[union-attr]  # of a Block
    norms = nn.Sequential(*(nn.Sequential(nn.LayerNorm(16, eps=eps), nn.GELU()) for eps in (1e-5, 1e-5, 1e-2, 1e-5)))
    odd = []
    for net, given in ((model, torch.arange(20).reshape(2, 10) % 11), (norms, torch.randn(2, 16))):
        odd += [each for each in Examination(capture_graph(net, given)).findings() if each.rule == "odd-block"]
    assert [(each.severity, each.module) for each in odd] == [("warning", "blocks.2.norm1")]


CHANGES: dict[str, Callable[[Attention], None]] = {
    "scale": lambda attention: setattr(attention, "scale", 1.0),
    "factor": lambda attention: setattr(attention, "change", _Times()),
    "detached": lambda attention: setattr(attention, "change", _Detached()),
    "dropout": lambda attention: setattr(attention, "change_scores", nn.Dropout(0.5)),
}


class _Detached(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


class _Turned(nn.Module):
    """Positions that are turned into the queries and keys."""

    def forward(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[-2])[:, None].float()
        return x * angle.cos() + torch.cat([-x[..., 4:], x[..., :4]], -1) * angle.sin()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_one_attention_with_changed_scores_is_named(kind: str, change: str) -> None:
    """A factor, a detach or a dropout in one block is named; a dropout of scores where they are no part of a kernel."""
    model = Model(**KINDS[kind])
    CHANGES[change](model.blocks[1].attn)  # type: ignore[arg-type]  # of a Block
    if change == "dropout" and KINDS[kind]["is_fused"]:
        assert found(model) == []
        return
    (finding,) = found(model)
    assert (finding.rule, finding.module, finding.is_note) == ("odd-attention", "blocks.1.attn", False)


def test_a_block_without_rotary_positions_is_a_note() -> None:
    """Some designs leave out the positions in single blocks."""
    model = Model(**PRE)
    blocks: Any = model.blocks
    for block in [blocks[0], *blocks[2:]]:
        block.attn.change = _Turned()
    (finding,) = found(model)
    assert (finding.rule, finding.module, finding.is_note) == ("odd-attention", "blocks.1.attn", True)


def test_a_block_with_a_mask_of_its_own_is_a_design() -> None:
    """Blocks of shifted windows add a mask that others do not need, and some layers see a window alone."""
    model = Model(**{**PRE, "is_fused": False})
    blocks: Any = model.blocks
    blocks[1].attn.change_scores = _Windows()
    assert found(model) == []


class _Windows(nn.Module):
    def forward(self, scores: Tensor) -> Tensor:
        places = torch.arange(scores.shape[-1])
        return scores + torch.where(places[:, None] // 5 == places // 5, 0.0, -100.0)
