"""One sick layer among the blocks of a deep model is seen at first sight, wherever a user looks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from torch import Tensor, nn

from lightning_recorder import default_recorders, open_recording
from lightning_recorder.commands import main
from tests.callbacks.models import digits, events, fit
from tests.plots.test_unusual import drawn_texts

BLOCKS = 12  # with more layers than a picture or a chart shows


class Block(nn.Module):
    """A transformer block with attention over the rows of an image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.act, self.fc2 = nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
        self.is_residual = True

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        attended = self.proj(nn.functional.scaled_dot_product_attention(q, k, v))
        x = x + attended if self.is_residual else attended
        y: Tensor = x + self.fc2(self.act(self.fc1(self.norm2(x))))
        return y


class Deep(LightningModule):
    """A transformer of many blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(BLOCKS))
        self.head = nn.Linear(16, 10)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.stem(batch[0].flatten(1, 2))
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.cross_entropy(self.head(x.mean(1)), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def explode(block: Any) -> None:
    """Make the weights of the last layer thirty times as large."""
    block.fc2.weight.data *= 30


def die(block: Any) -> None:
    """Let no value through the ReLU."""
    block.fc1.bias.data -= 20


def vanish(block: Any) -> None:
    """Make the result of the attention a hundredth."""
    block.proj.weight.data /= 100
    block.proj.bias.data /= 100


def saturate(block: Any) -> None:
    """Make the scale of a normalization forty times as large."""
    block.norm1.weight.data *= 40


def shift(block: Any) -> None:
    """Add a constant to the input of the second layer of the feed-forward part."""
    block.fc1.bias.data += 15


SICK: dict[Callable[[Any], None], set[str]] = {
    explode: {"fc2"},
    die: {"act", "fc1", "fc2"},
    vanish: {"proj"},
    saturate: {"norm1", "qkv"},
    shift: {"act", "fc1"},
}
"""The diseases, with the layers of the block that show it."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("disease", "place"),
    [
        (explode, 0),
        (explode, 6),
        (die, 11),
        (vanish, 6),
        (saturate, 0),
        (shift, 3),
    ],
)
def test_the_sick_layer_is_seen_first(
    disease: Callable[[Any], None], place: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is in bold in the first pictures, in the charts, in the first line of ``show``, and apart in the graph."""
    seed_everything(2, verbose=False)
    model = Deep()
    disease(model.blocks[place])
    sick = {f"blocks.{place}.{name}" for name in SICK[disease]}
    with drawn_texts() as (_, bold):
        trainer = fit(model, tmp_path, default_recorders(every_n_train_steps=5), loader=digits(12))
    folder = Path(str(trainer.log_dir))

    # Images: TensorBoard sorts them by tag.
    written = events(trainer)
    assert min(written.Tags()["images"]).startswith("z_recorder/Unusual/")
    assert sick & set(bold)

    # Custom Scalars.
    (layout,) = written.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val
    charts = [chart for category in Layout.FromString(layout).category for chart in category.chart]
    lines = {line for chart in charts for line in chart.multiline.tag}
    assert any(re.escape(f"/{name}/") in line for name in sick for line in lines)
    assert max(len(chart.multiline.tag) for chart in charts) <= 20

    # The table.
    capsys.readouterr()
    assert main(["show", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"^1 +(\S+)", shown, re.MULTILINE)[0] in sick

    # The graph.
    assert main(["graph", str(folder), "--format", "dot", "--color", "activations"]) == 0
    drawn = capsys.readouterr().out
    assert any(name in drawn for name in sick)
    assert len(set(re.findall(r"blocks\.\d+\.fc1", drawn))) <= 6


def freeze(model: Deep, block: Any) -> None:
    """Train the layers before and after one, but not this one."""
    block.fc1.requires_grad_(False)


def spoil(model: Deep, block: Any) -> None:
    """Make the result of a layer NaN between two records, so that everything is NaN in the next one."""
    block.fc1.register_forward_hook(lambda _, args, result: result * math.nan if model.global_step >= 21 else result)


def unlink(model: Deep, block: Any) -> None:
    """Leave out a residual connection. No statistic shows it, only the recorded graph."""
    block.is_residual = False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("disease", "named", "row", "epochs", "place"),
    [
        (freeze, ".fc1", ".fc1", 2, 3),
        (freeze, ".fc1", ".fc1", 1, 6),
        (spoil, ".fc1", ".fc1", 2, 6),
        (unlink, "", ".norm1", 2, 6),
        (unlink, "", ".norm1", 1, 3),
    ],
)
def test_the_layer_of_a_finding_is_seen_first(
    disease: Callable[[Deep, Any], None],
    named: str,
    row: str,
    epochs: int,
    place: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A layer that no statistic tells from the others is framed in the first pictures, in the charts, and so on.

    If a block is named, its first layer stands for it. The shorter run is examined only at its end.
    """
    seed_everything(2, verbose=False)
    model = Deep()
    block = f"blocks.{place}"
    sick = block + row
    disease(model, model.blocks[place])
    callbacks = default_recorders(every_n_train_steps=2 if epochs > 1 else 3)
    with drawn_texts() as (texts, _):
        trainer = fit(model, tmp_path, callbacks, loader=digits(12), max_epochs=epochs)
    folder = Path(str(trainer.log_dir))
    assert [each.module for each in open_recording(folder).findings] == [block + named]

    written = events(trainer)
    # Each picture has its title, its rows and its notes in order.
    starts = [number for number, text in enumerate(texts) if text == "activations: most unusual layers"]
    assert starts
    assert f"{place}{row}" in texts[starts[-1] : starts[-1] + 60] or sick in texts[starts[-1] : starts[-1] + 60]
    (layout,) = written.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val
    charts = [chart for category in Layout.FromString(layout).category for chart in category.chart]
    shown = {line for chart in charts for line in chart.multiline.tag}
    assert any(re.escape(f"z_recorder/activations/{sick}/") in line for line in shown)
    assert any(re.search(line, tag) for line in shown for tag in written.Tags()["scalars"] if f"/{sick}/" in tag)

    capsys.readouterr()
    assert main(["show", str(folder), "--recorder", "activations"]) == 0
    assert re.findall(r"^ *1 +(\S+)", capsys.readouterr().out, re.MULTILINE)[0] == sick
    assert main(["graph", str(folder), "--format", "dot", "--color", "activations"]) == 0
    (box,) = (line for line in capsys.readouterr().out.splitlines() if f'tooltip="{block}{named} ' in line)
    assert 'color="#d4002a"' in box
    assert ("NaN" in box) == (disease is spoil)
