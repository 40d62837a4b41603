"""Make the pictures of the documentation: of two runs, healthy and sick, and of the runs of the tutorials."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from playwright.sync_api import Page, expect
from sklearn.datasets import load_digits
from tensorboard.backend.event_processing.event_accumulator import IMAGES, EventAccumulator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_recorder import default_recorders, open_recording
from lightning_recorder.commands import main as command
from tests.browser.chromium import open_page
from tests.test_docs import blocks

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
SICK = "blocks.3.act"
TAGS = {
    "heat-map": "activations_plots/heat_map/zero_fraction",
    "ridge": "activations_plots/ridge",
    "flow": "gradients_plots/flow",
    "over-time": f"activations_plots/over_time/{SICK}",
}
"""The tags of the gallery's pictures by the first part of their file names."""


class Block(nn.Module):
    """A residual block of a normalization and two linear layers."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.ReLU()
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return result


class Digits(LightningModule):
    """Six residual blocks that classify digits. In a sick one, the ReLU of the fourth block is dead."""

    def __init__(self, *, sick: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 64)
        self.blocks = nn.Sequential(*(Block() for _ in range(6)))
        self.head = nn.Linear(64, 10)
        if sick:
            nn.init.constant_(self.get_parameter("blocks.3.up.bias"), -20.0)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, digits = batch
        return F.cross_entropy(self.head(self.blocks(self.stem(images))), digits)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def train(folder: Path, *, sick: bool) -> Path:
    """Record a fit of 150 steps and return its folder."""
    seed_everything(7)
    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32) / 16
    batches = DataLoader(TensorDataset(images, torch.tensor(data.target)), batch_size=64, shuffle=True)
    logger = TensorBoardLogger(folder, name="", version="sick" if sick else "healthy")
    trainer = Trainer(
        max_steps=150,
        accelerator="cpu",
        logger=logger,
        callbacks=[*default_recorders(every_n_train_steps=5)],
        enable_progress_bar=False,
    )
    trainer.fit(Digits(sick=sick), batches)
    return Path(logger.log_dir)


def save_images(run: Path) -> None:
    """Save the latest picture of each tag of the gallery."""
    for name, tag in TAGS.items():
        save_image(run, tag, f"{name}-{run.name}")


def save_image(run: Path, tag: str, name: str) -> None:
    """Save the latest picture of a tag, if the run has one."""
    events = EventAccumulator(str(run / "recorder"), size_guidance={IMAGES: 0})
    events.Reload()
    tag = f"z_recorder/{tag}"
    if tag in events.Tags()[IMAGES]:
        (PICTURES / f"{name}.png").write_bytes(events.Images(tag)[-1].encoded_image_string)


def photograph(page: Page, document: Path, name: str, layer: str = "") -> None:
    """Save what the page shows, with the panel of a layer."""
    page.goto(document.as_uri() + (f"#layer={layer}" if layer else ""))
    expect(page.locator(".verdict")).to_be_visible(timeout=20_000)
    if layer:
        expect(page.locator("aside.layer canvas").first).to_be_visible()
    page.wait_for_timeout(500)
    page.screenshot(path=PICTURES / f"{name}.png")


def photograph_graph(page: Page, name: str) -> None:
    """Save what the page that is open shows under its tab Graph."""
    page.get_by_role("tab", name="Graph").click()
    expect(page.locator("g.node").first).to_be_visible(timeout=20_000)
    page.wait_for_timeout(1500)
    page.screenshot(path=PICTURES / f"{name}.png")


def run_tutorial(name: str, folder: Path) -> list[Path]:
    """Run the code of a tutorial in a folder and return the folders of its runs."""
    with contextlib.chdir(folder):
        namespace: dict[str, object] = {"__name__": "reader"}
        for _, block in blocks(PICTURES.parent / "tutorials" / f"{name}.md"):
            exec(block, namespace)
    return sorted((folder / "lightning_logs").iterdir())


def photograph_tutorials(page: Page, folder: Path) -> None:
    """Save the pictures of the tutorials, from runs of their own code."""
    stuck = run_tutorial("stuck-loss", Path(tempfile.mkdtemp(dir=folder)))
    two = run_tutorial("two-runs", Path(tempfile.mkdtemp(dir=folder)))
    save_image(stuck[0], "activations_plots/heat_map/zero_fraction", "stuck-loss-heat-map")
    save_image(stuck[0], "activations_plots/ridge", "stuck-loss-ridge")
    files = [folder / f"{name}.html" for name in ("stuck", "repaired", "two")]
    open_recording(stuck[0]).page(files[0])
    open_recording(stuck[1]).page(files[1])
    command(["view", *map(str, two), "--output", str(files[2])])
    photograph(page, files[0], "stuck-loss-page", "net.6")
    photograph(page, files[1], "stuck-loss-repaired")
    photograph(page, files[2], "two-runs-page")


def shrink(path: Path) -> None:
    """Keep at most 256 colors; flat drawings look the same. Other methods mix the two reds of NaN and of findings."""
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


def main() -> None:
    """Train both runs, and save their pictures and what the page shows of them."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        # The header of the page has the last two folders.
        healthy, sick = (train(Path(folder, "runs"), sick=each) for each in (False, True))
        for run in (healthy, sick):
            save_images(run)
        command(
            ["graph", str(sick), "--color", "activations/zero_fraction", "--output", str(PICTURES / "graph-sick.png")]
        )
        command(["graph", str(healthy), "--output", str(PICTURES / "graph-healthy.png")])
        files = [Path(folder, f"{name}.html") for name in ("sick", "healthy", "both")]
        for run, file in zip((sick, healthy), files, strict=False):
            open_recording(run).page(file)
        command(["view", str(healthy), str(sick), "--output", str(files[2])])
        with open_page() as page:
            photograph(page, files[0], "page", SICK)
            photograph_graph(page, "page-graph")
            photograph(page, files[1], "page-healthy")
            photograph(page, files[2], "page-two-runs")
            photograph_tutorials(page, Path(folder))
    for picture in PICTURES.glob("*.png"):
        shrink(picture)


if __name__ == "__main__":
    main()
