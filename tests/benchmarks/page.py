"""The speed of the page: the time to write it, and in Chromium that of the first screen, the slider and the graph."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from playwright.sync_api import Page
from torch import Tensor, nn

from lightning_recorder.graph import record
from lightning_recorder.page import page_data, page_html
from lightning_recorder.recordings import RecordWriter, open_recording, records_path
from lightning_recorder.records.counts import SparseCounts
from lightning_recorder.records.table import Schema, Table
from lightning_recorder.reductions import ExponentHistogram
from lightning_recorder.taps import Site
from tests.browser.chromium import open_page

STATISTICS = ("count", "mean", "std", "rms", "min", "max", "zero_fraction", "nan_count", "inf_count")
NODES = 300  # that are visible while the slider moves


class Layer(nn.Module):
    """A block whose width no other one has, so that nothing is drawn once for several."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width + 1)
        self.activation = nn.ReLU()
        self.down = nn.Linear(width + 1, width + 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(self.activation(self.up(self.norm(x))))
        return found + nn.functional.pad(x, (0, 1))


def model(layers: int, each: int) -> nn.Sequential:
    """Return a model of this many layers in groups."""
    groups = [range(first, min(first + each, layers)) for first in range(0, layers, each)]
    return nn.Sequential(*[nn.Sequential(*[Layer(4 + number) for number in group]) for group in groups])


class Parallel(nn.ModuleDict):
    """Adds up the outputs of its modules."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = sum(each(x) for each in self.values())
        return found


def parallel(blocks: int) -> Parallel:
    """Return a model of equal blocks side by side."""
    return Parallel({f"block{number}": nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for number in range(blocks)})


def write_run(folder: Path, net: nn.Module, *, sites: int, records: int) -> None:
    """Write a run: records of the first ``sites`` modules, and the graph."""
    shutil.rmtree(folder, ignore_errors=True)  # records would be appended to those of an earlier call
    graph = record(net, "model", (2, 4))
    names = [name for name, module in net.named_modules() if name and not isinstance(module, nn.Sequential)][:sites]
    places = tuple(Site(name, "out") for name in names)
    schema = Schema(places, STATISTICS, ("float32",) * len(names), ((2, 8),) * len(names))
    generator = torch.Generator().manual_seed(0)
    counts = []
    for _ in range(20):
        histogram = ExponentHistogram()
        histogram.update(torch.randn(4096, generator=generator))
        counts.append(histogram.compute()["histogram"].long())
    histograms = SparseCounts.of_tensors(counts)
    writer = RecordWriter(records_path(folder / "recorder", "activations"))
    writer.begin(label="activations", group="activations")
    for step in range(records):
        values = torch.rand(len(names), len(STATISTICS), generator=generator, dtype=torch.float64)
        table = Table(schema, values.numpy(), histograms.take((np.arange(len(names)) + step) % 20))
        writer.write_all([({"step": step, "epoch": 0, "stage": "train", "loader": None}, table)])
    (folder / "recorder" / "graph.json").write_text(json.dumps(graph.to_json()), encoding="utf-8")


# Measures in the page, so that the time of the driver does not count.
_FIRST_SCREEN = """
addEventListener("DOMContentLoaded", () => {
  const look = () => {
    if (document.querySelector(SELECTOR)) requestAnimationFrame(() => { window.drawn = performance.now(); });
    else requestAnimationFrame(look);
  };
  look();
});
"""
_SLIDE = """async () => {
  const slider = document.querySelector("input[aria-label=step]");
  const frame = () => new Promise(requestAnimationFrame);
  const value = (each) => { slider.value = each; slider.dispatchEvent(new Event("input", { bubbles: true })); };
  await frame();
  const begin = performance.now();
  for (let at = 0; at < 60; at++) { value(at * Math.floor(slider.max / 60)); await frame(); }
  return 60000 / (performance.now() - begin);
}"""
_OPEN = """async (selector) => {
  const holder = document.querySelector(".graph svg > g"), sign = document.querySelector(selector);
  const begin = performance.now();
  const change = new Promise((resolve) => new MutationObserver(resolve).observe(holder, { childList: true }));
  sign.dispatchEvent(new MouseEvent("click", { bubbles: true }));
  await change;
  await new Promise(requestAnimationFrame);
  return performance.now() - begin;
}"""


def first_screen_ms(page: Page, path: Path, place: str, selector: str) -> float:
    """Return the time from the start of the navigation until an element is there."""
    page.add_init_script(_FIRST_SCREEN.replace("SELECTOR", json.dumps(selector)))
    page.goto(path.as_uri() + place)
    page.locator(selector).first.wait_for(state="attached", timeout=120_000)
    found: float = page.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(() => done(drawn), 50)))")
    return found


def slider_fps(page: Page) -> float:
    """Return the number of steps that the slider of the graph shows in a second."""
    found: float = page.evaluate(_SLIDE)
    return found


def opening_ms(page: Page, selector: str) -> float:
    """Return the time from a click on the sign of a module until its contents are there."""
    found: float = page.evaluate(_OPEN, selector)
    return found


def written_page(folder: Path, net: nn.Module, **sizes: int) -> tuple[Path, list[str]]:
    """Write a run and its page; return the path and a line about the cost."""
    write_run(folder, net, **sizes)
    begin = time.process_time()
    data = page_data({"run": open_recording(folder).run})
    middle = time.process_time()
    path = folder / "page.html"
    path.write_text(page_html(data, "run"), encoding="utf-8")
    end = time.process_time()
    nodes = len(data["runs"][0]["graph"]["nodes"])
    about = f"{sizes['sites']} sites x {sizes['records']} records, {nodes} nodes"
    size = path.stat().st_size / 1e6
    return path, [f"{about}; processor time: data {middle - begin:.2f} s, file {end - middle:.2f} s, {size:.2f} MB"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="keep the pages here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        usual, lines = written_page(folder / "usual", model(110, 11), sites=200, records=1000)
        large, more = written_page(folder / "large", model(1660, 40), sites=200, records=20)
        wide, last = written_page(folder / "wide", parallel(400), sites=200, records=20)
        print("\n".join(lines + more + last))
        with open_page() as page:
            print(f"first screen: {first_screen_ms(page, usual, '', '.strip canvas'):.0f} ms (goal 1,500)")
        with open_page() as page:
            print(f"graph of the usual run: {first_screen_ms(page, usual, '#tab=graph', 'g.node'):.0f} ms")
            print(f"closing a module: {opening_ms(page, 'g.frame .sign'):.0f} ms (goal 200)")
            print(f"opening a module: {opening_ms(page, 'g.node .sign'):.0f} ms (goal 200)")
            for _ in range(80):
                if page.locator("g.node").count() >= NODES or not page.locator("g.node .sign").count():
                    break
                print(f"  {page.locator('g.node').count()} nodes: opening {opening_ms(page, 'g.node .sign'):.0f} ms")
            print(f"slider with {page.locator('g.node').count()} nodes: {slider_fps(page):.0f} frames/s (goal 30)")
        with open_page() as page:
            print(f"large graph: {first_screen_ms(page, large, '#tab=graph', 'g.node'):.0f} ms (goal 4,000)")
            print(f"opening a module: {opening_ms(page, 'g.node .sign'):.0f} ms")
        with open_page() as page:
            print(f"400 blocks side by side: {first_screen_ms(page, wide, '#tab=graph', 'g.node'):.0f} ms (goal 2,000)")


if __name__ == "__main__":
    main()
