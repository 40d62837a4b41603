"""TensorBoard with a model of forty layers, at 1,400 × 900; the screenshots are kept in build/screenshots."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from PIL import Image
from playwright.sync_api import Page, expect
from torch import Tensor, nn

from lightning_recorder import ActivationRecorder, GradientRecorder, ParameterRecorder
from tests.browser.chromium import CHROMIUM, open_page
from tests.browser.server import get, get_json, tensorboard
from tests.callbacks.models import digits, fit

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH; .ci/run installs one"),
]

GROUPS = ["activations", "gradients", "parameters"]
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"


class Block(nn.Module):
    """Two layers around which the values go as well."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand, self.act, self.contract = nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.contract(self.act(self.expand(x)))
        return y


class Deep(LightningModule):
    """Forty layers with parameters: a stem, nineteen blocks, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Flatten(), nn.Linear(64, 32))
        self.blocks = nn.Sequential(*(Block(32) for _ in range(19)))
        self.head = nn.Linear(32, 10)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.head(self.blocks(self.stem(batch[0]))), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


@pytest.fixture(scope="module")
def deep_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server over a run of the model."""
    folder = tmp_path_factory.mktemp("deep")
    recorders = [ActivationRecorder(every_n_train_steps=2), GradientRecorder(every_n_train_steps=2)]
    fit(Deep(), folder, [*recorders, ParameterRecorder(every_n_train_steps=2)], loader=digits(40))
    with tensorboard(folder / "lightning_logs") as running:
        get_json(running, "images/tags")
        yield running


@pytest.fixture
def page() -> Iterator[Page]:
    """A page in a browser of its own."""
    with open_page() as opened:
        yield opened


def keep(page: Page, name: str) -> None:
    """Keep what the page shows, once it is drawn."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.wait_for_timeout(2500)
    page.screenshot(path=SCREENSHOTS / f"{name}.png")


def test_custom_scalars_have_a_few_layers_in_a_chart(page: Page, deep_address: str) -> None:
    """There is a chart of the main statistic of each group, with six lines, and its title says of how many."""
    for _ in range(100):  # the server reads the file in parts
        layout = get_json(deep_address, "custom_scalars/layout")
        if len(layout["category"]) == len(GROUPS):
            break
        page.wait_for_timeout(100)
    titles = {each["title"]: [chart["title"] for chart in each["chart"]] for each in layout["category"]}
    assert list(titles) == GROUPS
    assert [title.split()[0] for charts in titles.values() for title in charts] == ["rms", "rms", "update_ratio"]
    assert all("(6 of " in title for title in titles["activations"])
    tags = layout["category"][0]["chart"][0]["multiline"]["tag"]
    lines = [get_json(deep_address, "custom_scalars/scalars", run="version_0/recorder", tag=each) for each in tags]
    assert sum(len(each["tag_to_events"]) for each in lines) == 6
    page.goto(f"{deep_address}/#custom_scalars")
    expect(page.locator("tf-custom-scalar-multi-line-chart-card").first).to_be_visible(timeout=60_000)
    keep(page, "custom-scalars")


def test_one_picture_shows_all_layers(page: Page, deep_address: str) -> None:
    """Under Images there is a heat map of layers and steps for each of some statistics, at most 1,600 pixels high."""
    tags = get_json(deep_address, "images/tags")["version_0/recorder"]
    assert {f"z_recorder/{group}_plots/heat_map/rms" for group in GROUPS} <= set(tags)
    assert {"z_recorder/gradients_plots/flow", "z_recorder/parameters_grad_plots/flow"} <= set(tags)
    tag = "z_recorder/activations_plots/heat_map/rms"
    (*_, latest) = get_json(deep_address, "images/images", run="version_0/recorder", tag=tag, sample=0)
    with Image.open(io.BytesIO(get(deep_address, f"images/individualImage?{latest['query']}&"))) as picture:
        assert (latest["step"], picture.width, picture.height <= 1600) == (39, 350, True)
    page.goto(f"{deep_address}/#images")
    expect(page.locator("tf-image-loader img").first).to_be_visible(timeout=60_000)
    keep(page, "images")


def test_the_time_series_can_be_looked_through(page: Page, deep_address: str) -> None:
    """All tags are in one group behind the metrics of the user, and what is typed into the filter leaves one layer."""
    page.goto(f"{deep_address}/#timeseries")
    groups = page.locator("metrics-card-group-toolbar")
    expect(groups.last).to_have_text(re.compile("z_recorder"), timeout=60_000)
    assert [re.sub(r"\s*\d+ cards", "", each).strip() for each in groups.all_inner_texts()] == [
        "epoch",
        "loss",
        "z_recorder",
    ]
    keep(page, "time-series")
    tag = next(iter(get_json(deep_address, "scalars/tags")["version_0/recorder"]))
    page.locator("metrics-tag-filter input").fill(f"^{re.escape(tag)}")
    cards = page.locator("metrics-filtered-view card-view")
    expect(cards).to_have_count(1, timeout=60_000)
    expect(cards.first).to_contain_text(tag)
    keep(page, "time-series-of-one-layer")


def test_the_receipt_is_a_text(page: Page, deep_address: str) -> None:
    """Under Text each recorder has a table of what it has recorded."""
    assert set(get_json(deep_address, "text/tags")["version_0/recorder"]) == {
        f"z_recorder/{group}/receipt/text_summary" for group in GROUPS
    }
    page.goto(f"{deep_address}/#text")
    table = page.locator("tf-text-loader table").first
    expect(table).to_be_visible(timeout=60_000)
    expect(table).to_contain_text("blocks.18.contract")
    keep(page, "text")
