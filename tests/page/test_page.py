"""The page, as a person sees it."""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree as ET

import numpy as np
import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from lightning.pytorch import seed_everything
from PIL import Image
from playwright.sync_api import Page, expect
from torch import nn
from torch.utils.data import DataLoader

from lightning_recorder import (
    ActivationRecorder,
    CostRecorder,
    GraphRecorder,
    Outputs,
    ParameterRecorder,
    StepWatch,
)
from lightning_recorder.check import Answer, Result
from lightning_recorder.graph import capture_graph
from lightning_recorder.insight import Diagnosis, Finding, Trace
from lightning_recorder.insight.finding import RankStrip
from lightning_recorder.page import page_data, page_html
from lightning_recorder.page.histograms import packed_numbers
from lightning_recorder.page.runs import table_row
from lightning_recorder.recordings import WATCH, RecordWriter, open_recording, records_path
from lightning_recorder.records.table import SiteStatistics
from lightning_recorder.taps import Site
from tests.benchmarks.page import model, parallel
from tests.browser.chromium import CHROMIUM, open_page
from tests.callbacks.models import fit as fit_model
from tests.callbacks.test_actions import BAD, Net, fit
from tests.callbacks.test_attention import LENGTH, TOKENS
from tests.callbacks.test_attention import Model as Transformer
from tests.commands.console import run as command
from tests.page.test_data import written
from tests.recordings.runs import site_of

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH; .ci/run installs one"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    """One browser for all tests of this file."""
    with open_page() as opened:
        yield opened


@pytest.fixture
def page(browser: Page) -> Iterator[Page]:
    """A page that fails the test if a script fails or anything is asked from the network."""
    wrong: list[str] = []
    failed = lambda error: wrong.append(str(error))  # noqa: E731
    asked = lambda request: wrong.append(request.url) if request.url.startswith("http") else None  # noqa: E731
    browser.on("pageerror", failed)
    browser.on("request", asked)
    yield browser
    browser.remove_listener("pageerror", failed)
    browser.remove_listener("request", asked)
    browser.goto("about:blank")
    assert wrong == []


@pytest.fixture(scope="module")
def files(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page of each run and of both."""
    folder = tmp_path_factory.mktemp("pages")
    for name, paths in {"sick": ["sick"], "healthy": ["healthy"], "both": ["sick", "healthy"]}.items():
        said = command("view", *(runs / path for path in paths), "--output", folder / f"{name}.html")
        assert said.status == 0, said.err
    return folder


def opened(page: Page, path: Path, place: str = "") -> None:
    """Open a page from disk and wait until it is drawn."""
    page.goto("about:blank")
    page.goto(f"{path.as_uri()}{place}")
    expect(page.locator(".verdict")).to_be_visible(timeout=20_000)


def test_the_verdict_comes_first(page: Page, files: Path) -> None:
    """The sick run says what is wrong with which layer, the healthy one that nothing is."""
    opened(page, files / "sick.html")
    expect(page.locator(".verdict")).to_contain_text("finding")
    expect(page.locator(".findings li").first).to_contain_text("encoder.relu returns only zeros")
    opened(page, files / "healthy.html")
    expect(page.locator(".verdict")).to_have_text("✓ healthy")


def test_a_finding_leads_to_its_layer(page: Page, files: Path) -> None:
    """A click on a finding opens the panel of the layer, with the finding and its tensors; Escape closes it."""
    opened(page, files / "sick.html")
    page.locator(".findings li button").first.click()
    panel = page.locator("aside.layer")
    expect(panel.locator("h2")).to_have_text("encoder.relu")
    expect(panel).to_contain_text("ReLU")
    expect(panel).to_contain_text("Why")
    expect(panel.locator("canvas").first).to_be_visible()
    assert "layer=encoder.relu" in page.url
    page.keyboard.press("Escape")
    expect(panel).to_have_count(0)


def test_a_finding_about_a_block_leads_to_the_layer_in_it(page: Page, tmp_path: Path) -> None:
    """A finding that names a block opens the layer with the values that are shown, and this layer is marked."""
    strip_of(tmp_path, 30)
    run = open_recording(tmp_path).runs[tmp_path.name]
    trace = Trace("activations", "rms", (0,), (9.0,), "layers.20")
    finding = Finding("odd", "warning", "layers", "", 0, 0, 1, "layers differs", "why", "next", "usual", trace=trace)
    (tmp_path / "page.html").write_text(page_html(page_data({"run": run}, known={"run": Diagnosis([finding])}), "run"))
    opened(page, tmp_path / "page.html")
    assert page.locator(".strip .names .sick").all_inner_texts() == ["layers.20"]
    page.locator(".findings li button").first.click()
    expect(page.locator("aside.layer h2")).to_have_text("layers.20")
    expect(page.locator("aside.layer .finding")).to_contain_text("layers differs")


def test_a_finding_without_a_curve_shows_the_usual_statistic(page: Page, runs: Path, tmp_path: Path) -> None:
    """The quantity of the finding that was opened before says nothing about this one."""
    run = open_recording(runs / "sick").run
    first = next(each for each in run.findings if each.trace is not None and each.trace.statistic == "zero_fraction")
    other = replace(first, module="head", verdict="head is frozen", trace=None)
    path = tmp_path / "page.html"
    path.write_text(page_html(page_data({"run": run}, known={"run": Diagnosis([first, other])}), "run"))
    opened(page, path)
    for number, expected in ((0, "zero_fraction"), (1, "rms")):
        page.locator(".findings li > button").nth(number).click()
        expect(page.get_by_label("statistic", exact=True)).to_have_value(expected)
        page.keyboard.press("Escape")


def test_colors_are_those_of_the_records(page: Page, files: Path, runs: Path) -> None:
    """The number in a node is the value of the record at the step of the slider."""
    series = open_recording(runs / "healthy").run["activations"]
    opened(page, files / "healthy.html", "#tab=graph&show=activations/rms")
    slider = page.get_by_label("step", exact=True)
    colors = []
    for row in (0, len(series.steps) - 1):
        slider.fill(str(row))
        expect(page.locator("output")).to_have_text(f"step {series.steps[row]}")
        head = page.locator("g.node").filter(has=page.locator("text.title", has_text="head"))
        value = series["head"].statistic("rms")[row].item()
        expect(head.locator("title").first).to_have_text(re.compile(f"\n{re.escape(f'{value:.4g}')}"))
        colors.append(head.locator("rect").first.get_attribute("fill"))
    assert colors[0] != colors[1]


def test_the_graph_is_saved(page: Page, files: Path, tmp_path: Path) -> None:
    """The saved SVG is well formed, stands alone and has the box of every visible node."""
    opened(page, files / "healthy.html", "#tab=graph")
    page.locator("g.node").first.wait_for()
    with page.expect_download() as waiting:
        page.get_by_label("SVG: save the graph").click()
    path = tmp_path / "graph.svg"
    waiting.value.save_as(path)
    root = ET.parse(path).getroot()
    groups = [
        each for each in root.iter("{http://www.w3.org/2000/svg}g") if "node" in (each.get("class") or "").split()
    ]
    assert len(groups) == page.locator("g.node").count()
    assert ".node" in (root.findtext("{http://www.w3.org/2000/svg}style") or "")


def test_modules_open_and_close(page: Page, files: Path) -> None:
    """A double click on a closed module shows its contents, one on the open module closes it."""
    opened(page, files / "healthy.html", "#tab=graph")
    convolution = page.locator("g.node", has=page.locator("text.title", has_text="conv1"))
    expect(convolution).to_have_count(1)
    page.locator("g.frame", has=page.locator("text.title", has_text="encoder")).locator(".sign").click()
    expect(convolution).to_have_count(0)
    page.locator("g.node", has=page.locator("text.title", has_text="encoder")).dblclick()
    expect(convolution).to_have_count(1)


def test_search_finds_a_layer(page: Page, files: Path) -> None:
    """With / and a part of a name the layer is found, marked in the graph and opened by Enter."""
    opened(page, files / "healthy.html", "#tab=graph")
    page.keyboard.press("/")
    page.keyboard.type("encoder.conv2")
    expect(page.locator("g.node.found")).to_have_count(1)
    page.keyboard.press("Enter")
    expect(page.locator("aside.layer h2")).to_have_text("encoder.conv2")


def test_the_keyboard_is_enough(page: Page, files: Path) -> None:
    """The arrows change the step, g and o the tab, and Enter opens the layer of a node that has the focus."""
    opened(page, files / "healthy.html")
    before = page.locator("output").inner_text()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("output")).not_to_have_text(before)
    page.keyboard.press("g")
    node = page.locator("g.node", has=page.locator("text.title", has_text="head"))
    expect(node).to_have_count(1)
    node.focus()
    page.keyboard.press("Enter")
    expect(page.locator("aside.layer h2")).to_have_text("head")
    page.keyboard.press("o")
    expect(page.locator(".strip")).to_be_visible()


def test_two_runs_lie_over_each_other(page: Page, files: Path) -> None:
    """The first sentence says how the runs differ; charts have a line for each run, named in a legend."""
    opened(page, files / "both.html", "#layer=head")
    expect(page.locator(".comparison")).to_contain_text("encoder.norm bias")
    legend = page.locator("aside.layer .legend").first
    expect(legend.locator("i")).to_have_count(2)


@pytest.fixture(scope="module")
def difference(runs: Path, changed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of two runs with different graphs."""
    path = tmp_path_factory.mktemp("difference") / "page.html"
    assert command("view", runs / "healthy", changed, "--output", path).status == 0
    return path


def test_two_graphs_are_in_one_picture(page: Page, difference: Path) -> None:
    """Differences of two runs are marked in the graph and listed on the first screen."""
    opened(page, difference)
    listed = page.locator(".differing button").all_inner_texts()
    assert {"encoder.relu", "dropout"} <= {*listed}
    page.goto(f"{difference.as_uri()}#tab=graph&layer=dropout.1")
    relu = page.locator("g.altered", has=page.locator("text.detail", has_text="ReLU"))
    expect(relu).to_have_count(1)
    expect(page.locator("g.node.removed", has=page.locator("text.detail", has_text="Tanh"))).to_have_count(1)
    expect(page.locator("g.altered", has=page.locator("text.title", has_text="conv1"))).to_have_count(0)
    assert page.locator(".edges path.removed").count() > 0
    page.get_by_label("run", exact=True).select_option(index=1)
    expect(page.locator("g.node.added", has=page.locator("text.detail", has_text="Tanh"))).to_have_count(1)


def test_channels_have_a_picture(page: Page, difference: Path) -> None:
    """The panel shows a statistic with a value for each channel, and the tensors of the layer beside each other."""
    opened(page, difference, "#layer=encoder.conv2")
    page.get_by_label("run", exact=True).select_option(index=1)
    panel = page.locator("aside.layer")
    expect(panel).to_contain_text("channel_mean, each of 4")
    rows = panel.locator(".tensors tbody th").all_inner_texts()
    assert [each.split()[0] for each in rows] == ["input", "output"]


def test_the_slider_changes_attributes_only(page: Page, files: Path) -> None:
    """A step of the slider makes no element of the graph anew and lays nothing out."""
    opened(page, files / "healthy.html", "#tab=graph&show=activations/rms")
    page.locator("g.node").first.wait_for()
    changes = page.evaluate(
        """async () => {
          const slider = document.querySelector("input[aria-label=step]"), seen = { childList: 0, attributes: 0 };
          const text = (each) => each.target.nodeName === "title";
          const watch = new MutationObserver((all) => all.forEach((each) => { if (!text(each)) seen[each.type]++; }));
          watch.observe(document.querySelector(".graph svg"), { subtree: true, childList: true, attributes: true });
          slider.value = 0;
          slider.dispatchEvent(new Event("input", { bubbles: true }));
          await new Promise((done) => setTimeout(done, 300));
          return seen;
        }"""
    )
    assert changes["childList"] == 0
    assert 0 < changes["attributes"] < 4 * page.locator("g.node, g.frame").count()


def test_nan_is_not_what_is_missing(page: Page, tmp_path: Path) -> None:
    """In the strip, a record with NaN has another color than a record that lacks the site."""
    writer = RecordWriter(records_path(tmp_path / "recorder", "activations"))
    writer.begin(label="activations", group="activations")
    nan = float("nan")
    for step, values in enumerate([{"rms": 1.0, "count": 4.0}, {"rms": nan, "count": 4.0}, {"rms": nan, "count": nan}]):
        writer.write({"step": step}, [site_of("a", "out", values), site_of("b", "out", {"rms": 2.0, "count": 4.0})])
    path = tmp_path / "page.html"
    open_recording(tmp_path).page(path)
    opened(page, path, "#show=activations/rms")
    pixels = page.evaluate(
        "[...document.querySelector('.strip canvas').getContext('2d').getImageData(0, 0, 3, 1).data]"
        ".reduce((all, each, at) => { if (at % 4 === 0) all.push([]); all.at(-1).push(each); return all; }, [])"
    )
    assert pixels[1][:3] == [0xD6, 0x00, 0x8B]
    assert pixels[2][:3] == [0xA0, 0xA4, 0xAA]


def test_the_document_works_inside_a_notebook(page: Page, runs: Path) -> None:
    """The frame of a notebook shows the page, although it has neither an address nor rights."""
    page.set_content(f"<h1>notebook</h1>{open_recording(runs / 'sick').page()._repr_html_()}")  # type: ignore[attr-defined]
    inner = page.frame_locator("iframe")
    expect(inner.locator(".findings li").first).to_contain_text("encoder.relu", timeout=20_000)
    inner.get_by_role("tab", name="Graph").click()
    expect(inner.locator("g.node").first).to_be_visible(timeout=20_000)


def test_a_hostile_name_is_text(page: Page, tmp_path: Path) -> None:
    """A name made of HTML is shown as it is and runs nothing."""
    name = "<img src=x onerror=document.title='gone'>\"'&lt;</script>"
    run = written(tmp_path, [[1.0, 2.0], [1.0, 3.0]], [name, "b"])
    path = tmp_path / "page.html"
    path.write_text(page_html(page_data({name: run}), name), encoding="utf-8")
    opened(page, path)
    assert page.title() == "/".join(tmp_path.parts[-2:]) + ": no findings"
    page.locator(".strip .names button").first.click()
    expect(page.locator("aside.layer h2")).to_have_text(name)


UNREADABLE = """() => {
  const wrong = [], zoom = (each) => each.getScreenCTM ? each.getScreenCTM().a : 1;
  for (const each of document.querySelectorAll(".page *")) {
    const text = [...each.childNodes].filter((one) => one.nodeType === 3).map((one) => one.textContent.trim()).join("");
    if (!text || each.tagName === "title" || each.tagName === "OPTION" || !each.getClientRects().length) continue;
    const style = getComputedStyle(each), size = parseFloat(style.fontSize) * zoom(each);
    if (size < 10.99) wrong.push(`${text} has ${size} px`);
    if (style.overflowX === "hidden" && each.scrollWidth > each.clientWidth) wrong.push(`${text} is cut`);
    const box = each.closest("g.node")?.querySelector("rect"), width = (one) => one.getBoundingClientRect().width;
    if (box && width(each) > width(box)) wrong.push(`${text} is wider than its box`);
    const sign = each.closest("g")?.querySelector(".sign");
    if (sign && each.getBoundingClientRect().right > sign.getBoundingClientRect().left + 1 && each.matches(".title"))
      wrong.push(`${text} is under the sign`);
  }
  const places = ".page header > *, .page header span, .page td, .page th, .page .bar > *";
  for (const each of document.querySelectorAll(places))
    if (each.clientWidth && each.scrollWidth > each.clientWidth + 1) wrong.push(`${each.textContent} has no room`);
  if (document.documentElement.scrollWidth > innerWidth) wrong.push("the page is wider than the window");
  return wrong;
}"""


@pytest.mark.parametrize(("width", "height"), [(1400, 900), (2560, 1440)])
def test_text_can_be_read(page: Page, files: Path, width: int, height: int) -> None:
    """No text is smaller than 11 px on the screen, cut, or wider than its box, on any tab, with and without a layer."""
    page.set_viewport_size({"width": width, "height": height})
    for name in ("sick", "both"):
        for place in ("", "#layer=encoder.relu", "#tab=graph", "#tab=graph&layer=encoder.conv1"):
            opened(page, files / f"{name}.html", place)
            if "graph" in place:
                page.locator("g.node").first.wait_for()
            assert page.evaluate(UNREADABLE) == [], place
    page.get_by_label("zoom out").click()
    assert "px" in page.evaluate(UNREADABLE)[0]
    page.set_viewport_size({"width": 1400, "height": 900})


@pytest.fixture(scope="module")
def stuck(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run in which the second of four numbered layers returns only zeros."""
    folder = tmp_path_factory.mktemp("stuck")
    writer = RecordWriter(records_path(folder / "recorder", "activations"))
    writer.begin(label="activations", group="activations")
    zeros, others = torch.zeros(2048, dtype=torch.int64), torch.zeros(2048, dtype=torch.int64)
    zeros[0], others[700] = 8, 8
    for step in range(6):
        usual = {"rms": 1.0 + step, "min": 0.5, "max": 2.0, "zero_fraction": 0.25, "count": 8.0}
        dead = {"rms": 0.0, "min": 0.0, "max": 0.0, "zero_fraction": 1.0, "count": 8.0}
        sites = [
            site_of(f"net.{each}", "out", dead if each == 1 else usual, zeros if each == 1 else others)
            for each in range(4)
        ]
        writer.write({"step": step}, sites)
    path = folder / "page.html"
    open_recording(folder).page(path)
    return path


def test_a_label_is_never_a_number_alone(page: Page, stuck: Path) -> None:
    """Names that fit are whole, and the parent stays where a layer only has a number."""
    opened(page, stuck)
    labels = page.locator(".strip .names button").all_inner_texts()
    assert sorted(labels) == [f"net.{each}" for each in range(4)]


def strip_of(folder: Path, layers: int, steps: int = 9) -> Path:
    """Write the page of a run in which layer 20 has large outputs and a module of the graph was never called."""
    writer = RecordWriter(records_path(folder / "recorder", "activations"))
    writer.begin(label="activations", group="activations")
    for step in range(0, 10 * steps, 10):
        rms = {f"layers.{each}": 9.0 if each == 20 else 1.0 for each in range(layers)}
        writer.write({"step": step}, [site_of(name, "out", {"rms": each}) for name, each in rms.items()])
    net = nn.ModuleDict({"used": nn.Linear(2, 2), "spare": nn.Linear(2, 2)})
    blocks = nn.ModuleList(nn.ModuleDict({"fc": nn.Linear(2, 2), "drop": nn.Dropout()}) for _ in range(3))
    net["blocks"] = blocks

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        for each in blocks:
            inputs = each["fc"](inputs)  # type: ignore[index]  # a ModuleDict
        return net["used"](inputs)  # type: ignore[no-any-return]

    net.forward = forward
    graph = capture_graph(net, torch.ones(1, 2))
    (folder / "recorder" / "graph.json").write_text(json.dumps(graph.to_json()))
    open_recording(folder).page(folder / "page.html")
    return folder / "page.html"


@pytest.mark.parametrize(("layers", "labels"), [(43, 43), (64, 64), (300, None)])
def test_the_labels_of_the_strip(layers: int, labels: int | None, page: Page, tmp_path: Path) -> None:
    """Every row of up to 64 has its label; of more rows, the first, the last and those that stand out have one."""
    opened(page, strip_of(tmp_path, layers))
    shown = page.locator(".strip .names button")
    names = [each.inner_text() for each in shown.all()]
    assert labels in (None, len(names))
    assert {"layers.0", "layers.20", f"layers.{layers - 1}"} <= set(names)
    tops = sorted(float(box["y"]) for each in shown.all() if (box := each.bounding_box()) is not None)
    assert min(after - before for before, after in pairwise(tops)) > 13


def test_alike_modules_are_listed_once(page: Page, tmp_path: Path) -> None:
    """Modules that were never called and differ only in their numbers are one entry, and the list is not cut."""
    path = graph_of(tmp_path, named(part=nn.ReLU()), torch.ones(1, 2))
    file = tmp_path / "recorder" / "graph.json"
    graph = json.loads(file.read_text())
    blocks = [
        f"transformer.h.{each}.attention.self_attention.{part}" for each in range(12) for part in ("drop", "norm")
    ]
    graph["unused"]["modules"] = ["spare", *blocks]
    file.write_text(json.dumps(graph))
    writer = RecordWriter(records_path(tmp_path / "recorder", "activations"))
    writer.begin(label="activations", group="activations")
    writer.write({"step": 0}, [site_of("part", "out", {"rms": 1.0})])
    open_recording(tmp_path).page(path)
    opened(page, path)
    inside = "transformer.h.0…11.attention.self_attention"
    assert page.locator(".never").inner_text() == f"Never called: spare, {inside}.drop ×12, {inside}.norm ×12"
    assert page.evaluate(UNREADABLE) == []


def named(**parts: nn.Module) -> nn.Sequential:
    """Return a sequence of named parts."""
    return nn.Sequential(OrderedDict(parts))


def graph_of(folder: Path, net: nn.Module, batch: torch.Tensor) -> Path:
    """Write the page of a run that recorded the graph of a model and the loss of 20 steps."""
    writer = RecordWriter(records_path(folder / "recorder", WATCH))
    writer.begin(label=WATCH, group=WATCH)
    for step in range(20):
        writer.write({"step": step}, [site_of("loss", "", {"value": 1.0 / (1 + step)})])
    graph = capture_graph(net, batch)
    (folder / "recorder" / "graph.json").write_text(json.dumps(graph.to_json()))
    open_recording(folder).page(folder / "page.html")
    return folder / "page.html"


def test_a_long_title_has_room(page: Page, tmp_path: Path) -> None:
    """The sign that opens or closes a module is beside its title, however narrow the contents are."""
    name = "discriminator_of_the_generated_images"
    path = graph_of(tmp_path, named(**{name: nn.Sequential(nn.ReLU(), nn.Tanh())}), torch.ones(1, 2))
    opened(page, path, "#tab=graph")
    for kind in ("frame", "node"):
        box = page.locator(f"g.{kind}", has=page.locator("text.title", has_text=name))
        expect(box).to_have_count(1)
        assert page.evaluate(UNREADABLE) == []
        box.locator(".sign").click()


@pytest.mark.parametrize(("layers", "most"), [(15, 60), (60, 24)])
def test_a_graph_opens_with_few_boxes(page: Page, tmp_path: Path, layers: int, most: int) -> None:
    """At first, at most 60 boxes are shown, and 24 of a model of more than 300 nodes; the others are inside them."""
    path = graph_of(tmp_path, model(layers, 5), torch.ones(2, 4))
    opened(page, path, "#tab=graph")
    page.locator("g.node").first.wait_for()
    assert 1 < page.locator("g.node").count() <= most


def test_blocks_that_are_added_up_are_one_box(page: Page, tmp_path: Path) -> None:
    """Many equal blocks side by side are one box, though functions are called between them; a cell opens one block."""
    opened(page, graph_of(tmp_path, parallel(80), torch.ones(2, 4)), "#tab=graph")
    expect(page.locator("g.node text.title").filter(has_text="×")).to_have_text("block0 … block79  ×80")
    assert page.locator("g.node").count() < 8
    page.locator("g.node .cell").nth(40).dispatch_event("click")
    expect(page.locator("g.frame text.title").filter(has_text="block40")).to_be_visible()
    titles = page.locator("g.node text.title").filter(has_text="×").all_text_contents()
    assert titles == ["block0 … block39  ×40", "block41 … block79  ×39"]


def test_a_box_lists_the_dilations_of_its_blocks(page: Page, tmp_path: Path) -> None:
    """Blocks that differ in the dilation of a layer inside are one box, as in the picture, which says it."""
    sizes = (1, 2, 4, 8, 16)
    blocks = (nn.Sequential(nn.Conv1d(4, 4, 3, padding=size, dilation=size), nn.ReLU()) for size in sizes)
    opened(page, graph_of(tmp_path, nn.Sequential(*blocks), torch.ones(2, 4, 40)), "#tab=graph")
    box = page.locator("g.node", has=page.locator("text.title", has_text="×5"))
    expect(box.locator("text.detail")).to_have_text("Sequential · 2×4×40 · dilation 1, 2, 4, …, 16")


def test_the_steps_of_a_chart_are_whole(page: Page, tmp_path: Path) -> None:
    """The marks of the axis of steps are whole numbers, even of a short run on a wide screen."""
    path = graph_of(tmp_path, named(part=nn.ReLU()), torch.ones(1, 2))
    page.set_viewport_size({"width": 2560, "height": 1440})
    opened(page, path)
    marks = page.locator("[data-steps]").first.get_attribute("data-steps")
    page.set_viewport_size({"width": 1400, "height": 900})
    assert marks is not None
    assert len(marks.split()) > 5
    assert all(float(each).is_integer() for each in marks.split())


def test_the_axis_of_the_strip(page: Page, tmp_path: Path) -> None:
    """The steps are written beneath the strip, and the modules that were never called beneath the steps."""
    opened(page, strip_of(tmp_path, 3))
    assert page.locator(".stripes .steps span").all_inner_texts() == ["step 0", "20", "40", "60", "80"]
    assert page.locator(".never").inner_text() == "Never called: spare, blocks.0…2.drop ×3"


def test_axes_of_shares_and_constants(page: Page, stuck: Path) -> None:
    """The axis of a share is from 0 to 1, the one of a constant close around it."""
    opened(page, stuck, "#layer=net.1")
    charts = page.locator("aside.layer figure.chart", has=page.locator(".uplot"))
    axes = {
        chart.locator("figcaption span").first.inner_text().split(":")[0]: [
            float(end) for end in (chart.locator("[data-axis]").get_attribute("data-axis") or "").split()
        ]
        for chart in charts.all()
    }
    assert axes == {"rms": [-1.0, 1.0], "zero_fraction": [0.0, 1.0]}


def test_zeros_are_said_in_words(page: Page, stuck: Path) -> None:
    """A histogram of nothing but zeros is a sentence, the one of other values a picture."""
    opened(page, stuck, "#layer=net.1")
    expect(page.locator("aside.layer")).to_contain_text("All values are 0 in every record.")
    expect(page.locator("aside.layer .histogram")).to_have_count(0)
    opened(page, stuck, "#layer=net.2")
    expect(page.locator("aside.layer .histogram")).to_have_count(1)


def test_a_small_model_fills_the_screen(page: Page, files: Path, stuck: Path) -> None:
    """The rows of few layers are 28 pixels high, and the graph has the room beneath them, if there is one."""
    opened(page, stuck)
    cells = page.locator(".strip .cells").bounding_box()
    assert cells is not None
    assert cells["height"] == 4 * 28
    expect(page.locator(".beneath")).to_have_count(0)
    opened(page, files / "healthy.html")
    page.locator(".beneath g.node.module").first.click()
    expect(page.locator("aside.layer")).to_be_visible()


def test_nan_has_its_color_in_every_statistic(page: Page, tmp_path: Path) -> None:
    """A tensor with some NaN is marked as such, although its rms is the one of the other values."""
    writer = RecordWriter(records_path(tmp_path / "recorder", "activations"))
    writer.begin(label="activations", group="activations")
    for step, count in enumerate([0.0, 2.0]):
        writer.write({"step": step}, [site_of("a", "out", {"rms": 1.0, "nan_count": count, "count": 4.0})])
    path = tmp_path / "page.html"
    open_recording(tmp_path).page(path)
    for statistic, marked in (("rms", [False, True]), ("nan_count", [False, False])):
        opened(page, path, f"#show=activations/{statistic}")
        pixels = page.evaluate(
            "[0, 1].map((x) => "
            "[...document.querySelector('.strip canvas').getContext('2d').getImageData(x, 0, 1, 1).data])"
        )
        assert [each[:3] == [0xD6, 0x00, 0x8B] for each in pixels] == marked


def test_edges_have_shapes_on_request(page: Page, files: Path) -> None:
    """The shapes of tensors stand at the edges after a click on a button, and go away with the next one."""
    opened(page, files / "healthy.html", "#tab=graph")
    page.locator("g.node").first.wait_for()
    labels = page.locator(".edges text")
    expect(labels).to_have_count(0)
    button = page.get_by_label("show the shapes of tensors at the edges")
    button.click()
    expect(labels.filter(has_text="8×4×8×8").first).to_be_visible()
    button.click()
    expect(labels).to_have_count(0)


def test_nothing_is_beneath_the_page(page: Page, files: Path) -> None:
    """The text that is shown while the page loads is gone, and the page is as high as the window."""
    opened(page, files / "sick.html")
    expect(page.locator("body")).not_to_contain_text("Loading the recording")
    assert page.evaluate("document.documentElement.scrollHeight - innerHeight") == 0


@pytest.mark.parametrize("width", [390, 1280])
def test_the_tooltip_of_a_cell_is_whole(page: Page, tmp_path: Path, width: int) -> None:
    """The tooltip stays inside of the overview, also at the edges of the strip and beside a panel."""
    page.set_viewport_size({"width": width, "height": 844})
    opened(page, strip_of(tmp_path, 30), "#layer=layers.20" if width > 900 else "")
    main = page.locator("main").bounding_box()
    page.locator(".strip .cells").scroll_into_view_if_needed()
    cells = page.locator(".strip .cells").bounding_box()
    assert main is not None
    assert cells is not None
    for share in (0.01, 0.3, 0.5, 0.7, 0.99):
        page.locator(".strip .cells").hover(position={"x": cells["width"] * share, "y": 40})
        tip = page.locator(".tip").bounding_box()
        assert tip is not None
        assert main["x"] <= tip["x"]
        assert tip["x"] + tip["width"] <= main["x"] + main["width"]
    page.set_viewport_size({"width": 1400, "height": 900})


@pytest.mark.parametrize(
    ("weights", "legend"),
    [
        ([0.0, 0.05, 30.0], ["0.05", "30 (log)"]),
        ([1e-12, 0.05, 30.0], ["0.05", "30 (log)"]),
        ([0.001, 0.001, 0.001], ["0.001", ""]),
        ([0.0, 0.0, 0.0], ["0", ""]),
    ],
)
def test_the_legend_has_values_of_tensors(page: Page, tmp_path: Path, weights: list[float], legend: list[str]) -> None:
    """The legend begins and ends with values that have a color: neither of biases nor of the limit of a scale."""
    writer = RecordWriter(records_path(tmp_path / "recorder", "parameters"))
    writer.begin(label="parameters", group="parameters")
    sites = [site_of(f"layers.{at}", "weight", {"rms": each}) for at, each in enumerate(weights)]
    writer.write(
        {"step": 0},
        [*sites, site_of("layers.0", "bias", {"rms": 1e-5}), site_of("layers.0", "weight.grad", {"rms": 1e-17})],
    )
    path = tmp_path / "page.html"
    open_recording(tmp_path).page(path)
    opened(page, path, "#show=parameters/rms")
    ends = page.evaluate(
        "[...document.querySelector('.scale span').childNodes]"
        ".map((each) => each.nodeName === 'I' ? '|' : each.textContent)"
    )
    assert "".join(ends).split("|") == legend
    if legend[1]:
        colors = page.evaluate(
            "[0, 1].map((y) => "
            "[...document.querySelector('.strip canvas').getContext('2d').getImageData(0, y, 1, 1).data])"
        )
        assert [each[:3] for each in colors] == [[0x44, 0x01, 0x54]] * 2


def test_a_module_with_the_chosen_layer_is_closed(page: Page, files: Path) -> None:
    """The graph opens up to the layer of the panel, but does not stay so against the button or a sign."""
    opened(page, files / "healthy.html", "#tab=graph&layer=encoder.conv2")
    convolution = page.locator("g.node", has=page.locator("text.title", has_text="conv2"))
    expect(convolution).to_have_count(1)
    page.get_by_label("close all modules").click()
    page.wait_for_timeout(500)  # it was opened again after its layout
    expect(convolution).to_have_count(0)
    page.get_by_label("open the modules that fit").click()
    expect(convolution).to_have_count(1)
    page.locator("g.frame", has=page.locator("text.title", has_text="encoder")).locator(".sign").click()
    page.wait_for_timeout(500)
    expect(convolution).to_have_count(0)
    expect(page.locator("aside.layer")).to_be_visible()


@pytest.mark.parametrize(
    "values",
    [
        [10.0**power for power in range(-7, 5)],
        [2.0, 110.0],
        [3.3, 3.31],
        [0.34, 0.96],
        [-0.0081, 0.0001],
        [520.0, 520.0],
        [0.0, 0.0],
        [100.01, 100.012],
    ],
)
def test_axes_have_two_labels(page: Page, tmp_path: Path, values: list[float]) -> None:
    """The axis of values has at least two different labels, which do not touch, and the one of steps two, too."""
    writer = RecordWriter(records_path(tmp_path / "recorder", "activations"))
    writer.begin(label="activations", group="activations")
    for step, value in enumerate(values):
        writer.write({"step": 900_000 + 700_000 * step}, [site_of("a", "out", {"rms": value})])
    path = tmp_path / "page.html"
    open_recording(tmp_path).page(path)
    opened(page, path, "#layer=a")
    chart = page.locator("aside.layer [data-values]").first
    labels = (chart.get_attribute("data-values") or "").split()
    low, high = (float(each) for each in (chart.get_attribute("data-axis") or "").split())
    logarithmic = values[-1] > 50 * values[0] > 0
    at = [
        math.log(float(each) / low) / math.log(high / low) if logarithmic else (float(each) - low) / (high - low)
        for each in labels
    ]
    height = chart.evaluate("(each) => each.querySelector('.u-over').clientHeight")
    assert len(set(labels)) >= 2
    assert min(after - before for before, after in pairwise(at)) * height > 12
    assert -1e-6 < at[0] < at[-1] < 1 + 1e-6
    assert len((chart.get_attribute("data-steps") or "").split()) >= 2


def test_a_narrow_window_shows_everything(page: Page, files: Path) -> None:
    """On a phone, the legend and the table of tensors are not cut, charts take the width, and a longer list fades."""
    page.set_viewport_size({"width": 390, "height": 844})
    opened(page, files / "sick.html", "#show=parameters/rms")
    inside = "(all) => all.every((each) => each.getBoundingClientRect().right <= innerWidth)"
    assert page.locator(".scale span").evaluate_all(inside)
    widths = page.locator(".curves .uplot").evaluate_all("(all) => all.map((each) => each.clientWidth)")
    assert min(widths) > 350
    steps = page.locator(".stripes .steps span:visible").evaluate_all(
        "(all) => all.map((each) => each.getBoundingClientRect()).map((each) => [each.left, each.right])"
    )
    assert len(steps) > 1
    assert all(before[1] < after[0] for before, after in pairwise(steps))
    assert page.evaluate("getComputedStyle(document.querySelector('.findings'), '::after').position") == "sticky"
    opened(page, files / "sick.html", "#layer=encoder.norm")
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 844})
        assert page.locator("aside.layer .tensors .spark:visible").count() > 2
        assert page.locator("aside.layer .tensors, aside.layer .tensors .spark").evaluate_all(inside)
    page.set_viewport_size({"width": 1400, "height": 900})


def test_a_search_without_a_match_says_so(page: Page, files: Path) -> None:
    """Enter in the search for a name that no module has shows a message, which the next letter removes."""
    opened(page, files / "healthy.html")
    page.keyboard.press("/")
    page.keyboard.type("zzz")
    status = page.get_by_role("status").filter(has_text="no module matches")
    expect(status).to_have_count(0)
    page.keyboard.press("Enter")
    expect(status).to_be_visible()
    expect(page.locator("aside.layer")).to_have_count(0)
    page.keyboard.press("Backspace")
    expect(status).to_have_count(0)


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run of 24 blocks of four layers, of which one is sick."""
    folder = tmp_path_factory.mktemp("blocks")
    parts = [named(fc1=nn.Linear(4, 4), act=nn.ReLU(), fc2=nn.Linear(4, 4), norm=nn.LayerNorm(4)) for _ in range(24)]
    net = named(embed=nn.Linear(4, 4), h=nn.Sequential(*parts), head=nn.Linear(4, 4))
    names = [name for name, module in net.named_modules() if not list(module.children())]
    writer = RecordWriter(records_path(folder / "recorder", "activations"))
    writer.begin(label="activations", group="activations")
    for step in range(0, 100, 10):
        usual = {name: {"fc1": 1.0, "fc2": 4.0}.get(name.rpartition(".")[2], 2.0) for name in names}
        size = {name: 8.0 if name == names[60] and step >= 50 else usual[name] for name in names}
        zeros = {name: 0.5 if name.endswith("act") else 1e-6 for name in names} | {names[58]: 1.0, names[13]: 1e-4}
        sites = [{"rms": size[name], "zero_fraction": zeros[name], "count": 4.0} for name in names]
        writer.write({"step": step}, [site_of(name, "out", each) for name, each in zip(names, sites, strict=True)])
    graph = capture_graph(net, torch.ones(2, 4))
    (folder / "recorder" / "graph.json").write_text(json.dumps(graph.to_json()))
    trace = Trace("activations", "rms", (0,), (9.0,), names[60])
    finding = Finding(
        "odd", "warning", names[60], "out", 50, 90, 5, "it is large", "why", "next", "at most 5",
        numbers={"rms": 8.0}, trace=trace, others=(names[59], names[61]),
    )  # fmt: skip
    run = open_recording(folder).runs[folder.name]
    (folder / "page.html").write_text(page_html(page_data({"run": run}, known={"run": Diagnosis([finding])}), "run"))
    return folder / "page.html"


def odd_rows(page: Page) -> dict[str, str]:
    """The labels of the rows whose color in the last record few others have, and these colors."""
    count = page.evaluate("document.querySelector('.strip canvas').height")
    colors = page.evaluate(
        "(count) => [...Array(count).keys()].map((y) => [...document.querySelector('.strip canvas')"
        ".getContext('2d').getImageData(9, y, 1, 1).data].slice(0, 3).join())",
        count,
    )
    labels = sorted(page.locator(".strip .names button").all(), key=lambda each: each.bounding_box()["y"])  # type: ignore[index]
    return {labels[row].inner_text(): color for row, color in enumerate(colors) if colors.count(color) * 2 < count}


def test_shares_are_compared_by_their_difference(page: Page, blocks: Path) -> None:
    """A share that is twice that of the other blocks stands out, not one that is 100 times almost nothing."""
    opened(page, blocks, "#show=activations/zero_fraction")
    assert odd_rows(page) == {"▸ h.14 (4)": "178,24,43"}
    expect(page.locator(".bar .scale")).to_contain_text("0.5 less")
    expect(page.locator(".bar .scale")).to_contain_text("0.5 more than the others")


def test_the_strip_has_a_row_for_each_block(page: Page, blocks: Path) -> None:
    """Each block of a large model is a row that a click opens; it has the color of its layer that stands out most.

    A layer is compared with the same layer of the other blocks: with the other ``fc1``, not with an ``fc2``.
    """
    opened(page, blocks)
    labels = page.locator(".strip .names button")
    rows = labels.all_inner_texts()
    assert len(rows) < 40
    (sick,) = page.locator(".strip .names .sick").all()
    assert re.fullmatch(r"▸ h\.\d+ \(\d\)", sick.inner_text())
    assert odd_rows(page) == {sick.inner_text(): "244,165,130"}
    sick.click()
    expect(labels.filter(has_text="▾")).to_have_attribute("aria-expanded", "true")
    assert page.locator(".strip .names .sick").all_inner_texts() == ["h.14.norm"]
    labels.filter(has_text="▾").click()
    assert labels.all_inner_texts() == rows


def test_the_strip_shows_some_layers_and_steps(page: Page, blocks: Path) -> None:
    """The layers of one kind, or those that a finding names, can be shown alone, and so can a part of the steps."""
    opened(page, blocks)
    page.get_by_label("layers", exact=True).select_option("named by a finding")
    assert len(page.locator(".strip .names button").all()) == 1
    cells = page.locator(".strip .cells").bounding_box()
    assert cells is not None
    y = cells["y"] + cells["height"] / 2
    page.mouse.move(cells["x"] + cells["width"] * 0.35, y)
    page.mouse.down()
    page.mouse.move(cells["x"] + cells["width"] * 0.75, y)
    page.mouse.up()
    shown = page.locator(".stripes .steps span")
    assert (shown.first.inner_text(), shown.last.inner_text()) == ("step 30", "70")
    expect(page.locator("aside.layer")).to_have_count(0)
    page.get_by_text("show all steps").click()
    assert shown.last.inner_text() == "90"


def test_a_finding_has_numbers_and_neighbors(page: Page, blocks: Path) -> None:
    """A finding shows the measured number beside the usual one, and links to the modules around it."""
    opened(page, blocks)
    card = page.locator(".findings li").first
    expect(card).to_contain_text("Measured rms 8. Usual at most 5.")
    before, after = card.locator(".chain .link").all()
    name = card.locator(".chain b").inner_text()
    affected = card.locator(".others .link").all_inner_texts()
    assert len({name, before.inner_text(), after.inner_text()}) == 3
    assert len(affected) == 2
    before.click()
    expect(page.locator("aside.layer h2")).to_have_text(before.inner_text())


class Loss(nn.Module):
    """A layer and its loss; with more targets, the sum of the loss and of losses of modules made in ``forward``."""

    def __init__(self, *targets: int) -> None:
        super().__init__()
        self.head = nn.Linear(2, 3)
        self.targets = targets or (0,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *more = (torch.tensor([each]) for each in self.targets)
        found: torch.Tensor = nn.functional.cross_entropy(self.head(x), first)
        return sum((nn.CrossEntropyLoss()(self.head(x), each) for each in more), found)


def test_a_finding_about_the_loss_or_the_data_has_a_place(page: Page, tmp_path: Path) -> None:
    """A finding without a module is linked with the function that it names or with the batch, which the graph marks."""
    run = written(tmp_path, [[1.0]], ["head"])
    graph = capture_graph(Loss(), torch.ones(1, 2))
    (run.directory / "graph.json").write_text(json.dumps(graph.to_json()))
    line = next(each.source for each in graph.nodes if each.name == "cross_entropy")
    about = ((0, 0, 1), "why", "next", "usual")
    verdicts = {
        "label-smoothing": f"cross_entropy in forward ({line}) spreads",
        "sorted-by-class": "samples are sorted",
    }
    found = [Finding(rule, "warning", "", "", *about[0], verdict, *about[1:]) for rule, verdict in verdicts.items()]
    data = page_data({run.name: run}, known={run.name: Diagnosis(found)})
    (tmp_path / "page.html").write_text(page_html(data, "loss"))
    opened(page, tmp_path / "page.html")
    cards = page.locator(".findings li.warning")
    expect(cards.nth(0).locator(".chain .link")).to_have_text(["head", "cross_entropy"])
    expect(cards.nth(1).locator(".chain .link")).to_have_text(["input", "head"])
    cards.nth(0).get_by_text("cross_entropy", exact=True).click()
    expect(page.locator("aside.layer h2")).to_have_text("cross_entropy")
    expect(page.locator("g.node.sick .title")).to_have_text(["input", "cross_entropy"])
    expect(page.locator("g.node.chosen .title")).to_have_text("cross_entropy")


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("cross_entropy", "cross_entropy"),
        ("cross_entropy#2", "CrossEntropyLoss"),
        ("cross_entropy#3", "CrossEntropyLoss#2"),
    ],
)
def test_each_call_of_a_function_has_its_node(page: Page, tmp_path: Path, name: str, title: str) -> None:
    """The panel of a call of a function is that of its name in the records, and the graph marks this call."""
    run = written(tmp_path, [[1.0, 2.0, 3.0]], ["cross_entropy", "cross_entropy#2", "cross_entropy#3"])
    graph = capture_graph(Loss(0, 1, 2), torch.ones(1, 2))
    (run.directory / "graph.json").write_text(json.dumps(graph.to_json()))
    (tmp_path / "page.html").write_text(page_html(page_data({run.name: run}), "loss"))
    opened(page, tmp_path / "page.html", f"#tab=graph&layer={quote(name)}")
    expect(page.locator("aside.layer h2")).to_have_text(name)
    expect(page.locator("aside.layer .chain")).to_contain_text(name)
    expect(page.locator("g.node.chosen .title")).to_have_text([title])
    page.locator("g.node.chosen").click()
    expect(page.locator("aside.layer h2")).to_have_text(name)


def test_a_finding_about_parameters_shows_their_updates(page: Page, runs: Path, tmp_path: Path) -> None:
    """Without a curve, the strip has the group of records that the rule of the finding reads."""
    run = open_recording(runs / "healthy").run
    finding = Finding("frozen", "warning", "head", "", 0, 0, 1, "head is frozen", "why", "next", "usual")
    path = tmp_path / "page.html"
    path.write_text(page_html(page_data({"run": run}, known={"run": Diagnosis([finding])}), "run"))
    opened(page, path)
    expect(page.get_by_label("recorder", exact=True)).to_have_value("parameters")
    expect(page.get_by_label("statistic", exact=True)).to_have_value("update_ratio")


def test_the_model_itself_has_a_panel(page: Page, tmp_path: Path) -> None:
    """The tensors of the model itself, such as a parameter of its own, are shown; without a panel none is marked."""
    writer = RecordWriter(records_path(tmp_path / "recorder", "activations"))
    writer.begin(label="activations", group="activations")
    writer.write({"step": 0}, [site_of("", "token", {"rms": 3.0}), site_of("a", "out", {"rms": 1.0})])
    open_recording(tmp_path).page(tmp_path / "page.html")
    opened(page, tmp_path / "page.html")
    expect(page.locator(".strip .names .chosen")).to_have_count(0)
    page.locator(".strip .names button", has_text="(model)").click()
    expect(page.locator("aside.layer h2")).to_have_text("(model)")
    expect(page.locator("aside.layer .tensors")).to_contain_text("token")
    page.keyboard.press("Escape")
    expect(page.locator("aside.layer")).to_have_count(0)


def test_back_leads_to_what_was_shown(page: Page, files: Path) -> None:
    """The tab and the layer before are shown again; a slider that moves is one entry of the history."""
    opened(page, files / "sick.html")
    page.locator(".findings li button").first.click()
    page.get_by_role("tab", name="Graph").click()
    page.go_back()
    expect(page.get_by_role("tab", name="Overview")).to_have_attribute("aria-selected", "true")
    expect(page.locator("aside.layer h2")).to_have_text("encoder.relu")
    page.go_back()
    expect(page.locator("aside.layer")).to_have_count(0)
    page.go_forward()
    expect(page.locator("aside.layer h2")).to_have_text("encoder.relu")
    before = page.evaluate("history.length")
    for _ in range(4):
        page.keyboard.press("ArrowLeft")
    assert page.evaluate("history.length") <= before + 1


def test_the_page_is_accessible(page: Page, files: Path, blocks: Path) -> None:
    """The checks of axe-core find nothing, in the light and in the dark theme."""
    options = {"resultTypes": ["violations"], "rules": {"label-content-name-mismatch": {"enabled": True}}}
    for path, place in (
        (files / "both.html", ""),
        (files / "sick.html", "#tab=graph&layer=encoder.relu"),
        (blocks, ""),
    ):
        opened(page, path, place)
        if "graph" in place:
            page.locator("g.node").first.wait_for()
        for theme in ("light", "dark"):
            page.emulate_media(color_scheme=theme)
            found = Axe().run(page, options=options).response["violations"]
            assert [(each["id"], each["nodes"][0]["html"]) for each in found] == []
    page.emulate_media(color_scheme="light")
    assert "/" in page.title()


def test_a_healthy_run_names_its_extremes(page: Page, files: Path) -> None:
    """Without findings, the three layers farthest from the usual value are links, called normal."""
    opened(page, files / "healthy.html")
    expect(page.locator(".extremes")).to_contain_text("all within the usual range")
    assert len(set(page.locator(".extremes .link").all_inner_texts())) == 3
    link = page.locator(".extremes .link").first
    link.click()
    expect(page.locator("aside.layer h2")).to_have_text(link.inner_text())


def test_a_loss_has_no_row_among_the_layers(page: Page, tmp_path: Path) -> None:
    """A loss and what enters it have other scales than the layers; the panel has them nevertheless."""
    writer = RecordWriter(records_path(tmp_path / "recorder", "activations"))
    writer.begin(label="activations", group="activations")
    values = {("a", "out"): 1.0, ("b", "out"): 2.0, ("cross_entropy", "out"): 1e6, ("cross_entropy", "in.target"): 1e-6}
    writer.write({"step": 0}, [site_of(*site, {"rms": value}) for site, value in values.items()])
    path = tmp_path / "page.html"
    open_recording(tmp_path).page(path)
    opened(page, path)
    assert sorted(page.locator(".names button").all_inner_texts()) == ["a", "b"]
    expect(page.locator(".extremes")).not_to_contain_text("cross_entropy")
    opened(page, path, "#layer=cross_entropy")
    page.get_by_text("all statistics and tensors").click()
    expect(page.locator("aside.layer")).to_contain_text("in.target")


def test_axes_and_charts_of_partial_records(page: Page, tmp_path: Path) -> None:
    """The axis of steps ends with the last step, that of a constant count begins at 0; no record is no NaN."""
    writer = RecordWriter(records_path(tmp_path / "recorder", "activations"))
    writer.begin(label="activations", group="activations")
    for step in range(0, 47, 2):
        sites = [site_of("a", "out", {"rms": 1.0 + step, "count": 7.0})]
        sites += [site_of("b", "out", {"rms": 2.0, "count": 7.0})] * (step > 20)
        sites += [site_of("c", "out", {"rms": 2.0, "count": 7.0})] * (step == 46)
        writer.write({"step": step}, sites)
    path = tmp_path / "page.html"
    open_recording(tmp_path).page(path)
    opened(page, path, "#layer=a")
    page.get_by_text("all statistics and tensors").click()
    chart = page.locator("aside.layer figure", has_text="rms:").first.locator("[data-steps]")
    assert (chart.get_attribute("data-steps") or "").split()[-1] == "46"
    axis = page.locator("aside.layer figure", has_text="count:").first.locator("[data-axis]").get_attribute("data-axis")
    assert axis is not None
    assert axis.split()[0] == "0"
    opened(page, path, "#layer=b")
    assert page.locator("aside.layer .spark path").count() > 0
    assert page.locator("aside.layer .spark rect").count() == 0  # the mark of a NaN
    opened(page, path, "#layer=c")
    marks = page.locator("aside.layer figure", has_text="rms:").first.locator("[data-steps]")
    assert (marks.get_attribute("data-steps") or "").split()[-1] == "46"


def test_curves_are_smoothed_on_request(page: Page, tmp_path: Path) -> None:
    """A smoothed curve has another last value, and is beside the recorded one."""
    opened(page, graph_of(tmp_path, named(part=nn.ReLU()), torch.ones(1, 2)))
    chart = page.get_by_role("img", name=re.compile("^loss over steps"))
    before = chart.get_attribute("aria-label")
    page.get_by_label("smoothing").select_option("0.9")
    expect(chart).not_to_have_attribute("aria-label", before or "")
    page.get_by_label("smoothing").select_option("none")
    expect(chart).to_have_attribute("aria-label", before or "")


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
def test_a_step_that_was_left_out_is_marked_in_the_charts(page: Page, tmp_path: Path) -> None:
    """Each chart of the watch has a mark at the steps at which it has acted, and says so."""
    quiet = Outputs(plots=False, dumps=False)
    fit(Net(), tmp_path, StepWatch(on_finding="skip"), ParameterRecorder(every_n_train_steps=10, outputs=quiet))
    open_recording(tmp_path).page(tmp_path / "page.html")
    opened(page, tmp_path / "page.html")
    for name in ("loss", "gradient norm"):
        chart = page.get_by_role("img", name=re.compile(f"^{name} over steps"))
        expect(chart).to_have_attribute("aria-label", re.compile(f"the watch acted at {BAD}$"))
    expect(page.locator(".curves .legend", has_text="the watch acted")).to_have_count(2)


def test_ranks_that_differ_have_a_strip(page: Page, tmp_path: Path) -> None:
    """A finding about ranks has one row per rank, the groups of equal values, and the same in words."""
    strip = RankStrip(
        (0, 1, 2),
        ("head.weight", "head.bias", "head.weight.exp_avg"),
        ("parameter", "parameter", "state"),
        ((0, 0, 0),) * 3,
        ((0, 1, 0), (0, 0, 0), (0, 1, 2)),
        ((0.0, 0.5, 0.0), (0.0, 0.0, 0.0), (0.0, 2.0, 3.0)),
        5,
        10,
    )
    finding = Finding("ranks-differ", "critical", "head", "", 10, 10, 1, "they differ", "", "", "", strip=strip)
    run = written(tmp_path, [[1.0]], ["head"])
    data = page_data({run.name: run}, known={run.name: Diagnosis([finding])})
    (tmp_path / "page.html").write_text(page_html(data, "ranks"))
    opened(page, tmp_path / "page.html")
    card = page.locator(".findings li.critical figure.ranks")
    expect(card.locator("text.rank")).to_have_text(["rank 0", "rank 1", "rank 2"])
    expect(card.locator("text.group")).to_have_text(["A", "B", "A", "A", "B", "C"])
    expect(card.locator("figcaption")).to_contain_text("After step 10")
    expect(card.locator("li")).to_have_text(
        [
            "head.weight: A = ranks 0, 2; B = rank 1; up to 0.5 × their size apart",
            "head.weight.exp_avg: A = rank 0; B = rank 1; C = rank 2; up to 3 × their size apart",
            "1 tensor of the strip equal on all ranks",
            "2 compared tensors without a column",
        ]
    )


def test_a_link_says_where_it_works(page: Page, files: Path) -> None:
    """The button says that the link to a file works on this machine."""
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    opened(page, files / "healthy.html")
    page.get_by_text("copy link").click()
    expect(page.locator(".copy [role=status]")).to_have_text("copied; it opens this file on this machine")
    assert page.evaluate("navigator.clipboard.readText()") == page.url


def test_a_check_has_a_section_of_its_own(page: Page, tmp_path: Path) -> None:
    """Wrong answers come first, each with number, expectation and line; what was left out follows with the reason."""
    run = written(tmp_path, [[1.0]], ["fc"])
    answers = [
        Answer("ok", "fine", question="cost", asks="What will it cost?", expected="little"),
        Answer("no answer", "there is no target", asks="Does the loss use its target?"),
        Answer("wrong", "they mix", {"share": math.nan}, "train.py:3", "fc", "samples-mix", "Do samples mix?", "no"),
    ]
    text = json.dumps(Result(tuple(answers), 3.0, 0.5).to_json())
    (tmp_path / "recorder" / "check.json").write_text(text)
    (tmp_path / "page.html").write_text(page_html(page_data({"run": run}), "run"))
    opened(page, tmp_path / "page.html")
    expect(page.locator(".findings .checked")).to_contain_text("1 wrong, 1 ok, 1 no answer")
    expect(page.locator(".findings .checked")).to_contain_text("Do samples mix? They mix. (train.py:3)")
    page.get_by_role("tab", name="Check").click()
    rows = page.locator(".check tbody tr")
    assert [row.inner_text().split("\t") for row in rows.all()] == [
        ["✕ wrong", "Do samples mix?", "They mix. share NaN fc", "no", "train.py:3"],
        ["✓ ok", "What will it cost?", "Fine.", "little", ""],
    ]
    expect(page.locator(".check li")).to_have_text("Does the loss use its target? there is no target.")
    page.locator(".check").get_by_role("button", name="fc").click()
    expect(page.locator("aside.layer h2")).to_have_text("fc")


def test_a_check_alone_can_be_viewed(page: Page, tmp_path: Path) -> None:
    """A program that only was checked has a page."""
    (tmp_path / "recorder").mkdir()
    result = Result((Answer("ok", "fine", asks="What will it cost?"),), 3.0, 0.5)
    (tmp_path / "recorder" / "check.json").write_text(json.dumps(result.to_json()))
    assert command("view", tmp_path, "--output", tmp_path / "page.html").status == 0
    opened(page, tmp_path / "page.html", "#tab=check")
    expect(page.locator(".check tbody")).to_contain_text("What will it cost?")


def test_what_was_logged_is_on_the_first_screen(page: Page, files: Path) -> None:
    """A run with at most one finding has charts of the metrics of the user and of the learning rate above the strip."""
    for name in ("healthy", "sick"):
        opened(page, files / f"{name}.html")
        charts = page.locator(".findings .logged figcaption > span:first-child")
        assert charts.all_inner_texts() == ["learning rate", "train_loss"]
    expect(page.locator(".findings li.warning, .findings li.critical")).to_have_count(1)


def test_many_runs_have_a_table(page: Page, tmp_path: Path) -> None:
    """Three runs are listed with verdict, last values and a strip; two that are chosen are laid over each other."""
    runs = {name: written(tmp_path / name, [[place + 1.0, 2.0]] * 3, ["a", "b"]) for place, name in enumerate("xyz")}
    for place, run in enumerate(runs.values()):
        writer = RecordWriter(records_path(run.directory, WATCH))
        writer.begin(label=WATCH, group=WATCH, settings={"optimizers": [{"groups": [{"lr": place / 10}]}]})
        writer.write({"step": 0}, [site_of("loss", "out", {"value": 3.0 - place})])
    path = tmp_path / "page.html"
    assert command("view", *(tmp_path / name for name in runs), "--output", path).status == 0
    opened(page, path)
    expect(page.locator(".runs tbody tr")).to_have_count(3)
    cells = [row.locator("td, th").all_inner_texts() for row in page.locator(".runs tbody tr").all()]
    assert [(row[1].split("/")[-1], *row[3:5]) for row in cells] == [
        ("x", "0", "3"),
        ("y", "0.1", "2"),
        ("z", "0.2", "1"),
    ]
    expect(page.locator(".runs canvas")).to_have_count(3)
    page.get_by_role("button", name="loss").click()
    assert page.locator(".runs tbody th").first.inner_text().endswith("z")
    page.locator(".runs input").nth(0).check()
    page.locator(".runs input").nth(2).check()
    page.get_by_role("button", name="lay two over each other").click()
    expect(page.locator(".comparison")).to_contain_text("compared with")
    expect(page.locator(".curves .legend").first).to_contain_text("x")
    page.get_by_role("tab", name="Runs").click()
    assert Axe().run(page).response["violations"] == []


def test_a_run_that_diverged_does_not_hide_the_others(page: Page, tmp_path: Path) -> None:
    """The colors of the strips in the table are those of healthy runs; values beyond them have the last color."""
    runs = {name: written(tmp_path / name, [[1.0, 2.0]] * 3, ["a", "b"]) for name in "xyz"}
    rows = [
        {**table_row(run), "name": name, "healthy": name != "z", "strip": strip([1.0, 1e9 if name == "z" else 2.0])}
        for name, run in runs.items()
    ]
    (tmp_path / "page.html").write_text(page_html(page_data(runs, table=rows), "runs"))
    opened(page, tmp_path / "page.html")
    expect(page.locator(".runs .scale")).to_contain_text(re.compile("^1 *2"))
    pixels = [
        canvas.evaluate("canvas => [...canvas.getContext('2d').getImageData(0, 0, 1, 2).data]")
        for canvas in page.locator(".runs canvas").all()
    ]
    assert pixels[0] == pixels[1] == pixels[2]
    assert pixels[0][:4] != pixels[0][4:]


def strip(values: list[float]) -> dict[str, Any]:
    """Return the strip of a run with one step, in the data of the page."""
    return {"steps": [0], "values": packed_numbers(np.array(values)), "statistic": "activations rms"}


_DEFICIENCIES = ("none", "protanopia", "deuteranopia", "tritanopia")


@pytest.mark.parametrize("is_relative", [False, True])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colors_have_one_meaning_each_for_everyone(theme: str, is_relative: bool, page: Page, stuck: Path) -> None:
    """NaN and the ends of a scale differ for the color-blind, and all colors of a scale from what is not recorded."""
    opened(page, stuck)
    page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]  # a word
    page.get_by_label("relative to the other blocks").set_checked(is_relative)
    legend = page.locator(".bar .scale")
    session = page.context.new_cdp_session(page)
    for deficiency in _DEFICIENCIES:
        session.send("Emulation.setEmulatedVisionDeficiency", {"type": deficiency})
        bars = legend.locator("i").screenshot(), *(each.screenshot() for each in legend.locator("b").all()[:2])
        pictures = [np.asarray(Image.open(BytesIO(each)).convert("RGB")).astype(int) for each in bars]
        scale, not_finite, missing = pictures
        colors = [
            scale[5, 3],
            scale[5, -4],
            *(each[len(each) // 2, each.shape[1] // 2] for each in (not_finite, missing)),
        ]
        distances = [np.abs(one - other).max() for place, one in enumerate(colors) for other in colors[:place]]
        assert min(distances) >= 24, (deficiency, colors)
        assert np.abs(scale[5, 3:-3] - colors[-1]).max(1).min() >= 24, deficiency
    session.send("Emulation.setEmulatedVisionDeficiency", {"type": "none"})
    page.emulate_media(color_scheme="light")


def test_lines_of_charts_are_bright_in_the_dark_theme(page: Page, files: Path) -> None:
    """The lines of charts and their legend change with the theme, also while the page is open."""
    opened(page, files / "both.html")
    legend = page.locator(".curves .legend i").first
    for theme, ink in (("light", 0), ("dark", 255)):
        page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]  # a word
        expect(legend).to_have_css("background-color", "rgb(0, 114, 178)" if ink == 0 else "rgb(86, 180, 233)")
        chart = np.asarray(Image.open(BytesIO(page.locator(".curves canvas").first.screenshot())).convert("RGB"))
        wanted = np.array([0, 114, 178] if ink == 0 else [86, 180, 233])
        assert (np.abs(chart.astype(int) - wanted).max(2) < 8).sum() > 50
    page.emulate_media(color_scheme="light")


@pytest.mark.parametrize(("width", "height"), [(400, 800), (700, 450)])  # a phone, and a laptop at 200 %
def test_check_and_runs_fit_into_a_narrow_window(width: int, height: int, page: Page, tmp_path: Path) -> None:
    """Nothing is cut at 400 pixels or at 200 %, and each word of the check is in one line."""
    run = written(tmp_path, [[1.0]], ["fc"])
    answer = Answer("look", "the loss is larger than expected", asks="Is the loss right at the start?", expected="2.3")
    (tmp_path / "recorder" / "check.json").write_text(json.dumps(Result((answer,), 3.0, 0.5).to_json()))
    (tmp_path / "page.html").write_text(page_html(page_data({"run": run}), "run"))
    page.set_viewport_size({"width": width, "height": height})
    opened(page, tmp_path / "page.html", "#tab=check")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cell = page.get_by_text("Is the loss right at the start?", exact=True)
    box = cell.bounding_box()
    assert box is not None
    assert box["height"] < 60
    page.set_viewport_size({"width": 1400, "height": 900})


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages of transformers with a dead head, with a starved expert and without a fault, and with costs."""
    folder = tmp_path_factory.mktemp("parts")
    for name in ("dead head", "starved", "healthy"):
        seed_everything(0, verbose=False)
        tokens = torch.randint(0, TOKENS, (160, LENGTH))
        loader: Any = DataLoader(tokens, batch_size=16)  # type: ignore[arg-type]  # a tensor is a data set
        options: dict[str, Any] = {"every_n_train_steps": 2, "outputs": Outputs(plots=False, dumps=False)}
        recorders = [ActivationRecorder(**options), GraphRecorder(formats=()), CostRecorder(**options)]
        fit_model(Transformer(name.removeprefix("healthy")), folder / name, recorders, loader=loader, logger=False)
        open_recording(folder / name).page(folder / f"{name}.html")
    return folder


@pytest.mark.parametrize(
    ("fault", "title", "statistic", "cell", "count"),
    [
        ("dead head", "heads of attention", "attention_value_rms", "head 1 of blocks.2.attn", 4),
        ("starved", "experts of routers", "router_load", "expert 4 of blocks.2.mlp", 6),
    ],
)
def test_heads_and_experts_have_a_strip(
    page: Page, parts: Path, fault: str, title: str, statistic: str, cell: str, count: int
) -> None:
    """Layers × heads or experts, with a frame where a finding is; the keys lead to each cell and its layer."""
    opened(page, parts / f"{fault}.html")
    expect(page.get_by_label("recorder", exact=True)).to_have_value(title)
    expect(page.get_by_label("statistic", exact=True)).to_have_value(statistic)
    canvas = page.locator(".cells canvas")
    assert [canvas.get_attribute(each) for each in ("width", "height")] == [str(count), "4"]
    assert sorted(page.locator(".names button").all_inner_texts()) == [
        f"blocks.{row}.{cell.rsplit('.', maxsplit=1)[-1]}" for row in range(4)
    ]
    chain = page.locator(".findings li .chain").first.locator(".link").all_inner_texts()
    assert cell.rsplit(maxsplit=1)[-1] in [each.rpartition(".")[0] for each in chain]  # the function is inside of it
    number = int(cell.split()[1])
    frame, area = page.locator(".cells .named").bounding_box(), canvas.bounding_box()
    assert frame is not None
    assert area is not None
    found = (frame["x"] - area["x"]) / frame["width"], (frame["y"] - area["y"]) / frame["height"]
    assert found == pytest.approx((number, 2), abs=0.02)
    step = page.locator("output").inner_text()
    page.locator(".cells").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", *["ArrowRight"] * number):
        page.keyboard.press(key)
    expect(page.locator(".cells [role=status]")).to_have_text(
        re.compile(rf"^{re.escape(cell)}\S*: {statistic} 0 at step 9, named by a finding$")
    )
    assert page.locator("output").inner_text() == step  # the arrows of the strip are not those of the slider
    page.keyboard.press("Enter")
    expect(page.locator("aside.layer h2")).to_have_text(re.compile(re.escape(cell.rsplit(maxsplit=1)[-1])))


def test_the_strip_of_heads_follows_the_step(page: Page, parts: Path) -> None:
    """A cell has the value of the record at the step of the slider, and no frame without a finding."""
    opened(page, parts / "healthy.html", "#show=heads of attention/attention_max_logit")
    assert page.locator(".cells .named").count() == 0
    site = "blocks.1.attn.scaled_dot_product_attention", "in.scores"
    series = open_recording(parts / "healthy").run["activations"]
    slider, colors = page.get_by_label("step", exact=True), ""
    for row in (0, int(slider.get_attribute("max") or 0)):
        slider.fill(str(row))
        step = max(each for each in series.steps if each <= int(page.locator("output").inner_text().split()[1]))
        expect(page.locator(".bar h2")).to_have_text(f"All layers over heads of attention, step {step}")
        value = series[site].vectors(step)["attention_max_logit"][0].item()
        page.locator(".cells").hover(position={"x": 10, "y": 40})
        expect(page.locator(".tip")).to_have_text(
            f"head 0 of {site[0]}: attention_max_logit {value:.4g} at step {step}"
        )
        # Not `wait_for_function`: it evaluates text inside of the page, whose policy forbids that.
        painted = page.locator(".cells canvas").evaluate(
            """async (canvas, before) => {
                for (let frame = 0; frame < 600 && canvas.toDataURL() === before; frame++)
                    await new Promise(requestAnimationFrame);
                return canvas.toDataURL();
            }""",
            colors,
        )
        assert painted != colors
        colors = painted
    page.get_by_label("statistic", exact=True).select_option("attention_padding")  # there is none
    gray = f"{0xA0},{0xA4},{0xAA},255"
    pixel = page.locator(".cells canvas").evaluate(
        """async (canvas, gray) => {
            const pixel = () => [...canvas.getContext("2d").getImageData(0, 0, 1, 1).data].join();
            for (let frame = 0; frame < 600 && pixel() !== gray; frame++) await new Promise(requestAnimationFrame);
            return pixel();
        }""",
        gray,
    )
    assert pixel == gray
    page.get_by_role("tab", name="Graph").click()  # a node has one color
    expect(page.get_by_label("recorder", exact=True)).to_have_value("activations")


def test_a_head_with_nan_is_not_one_that_is_missing(page: Page, tmp_path: Path) -> None:
    """A head whose scores are NaN, and a layer with fewer heads, have different colors."""
    writer = RecordWriter(records_path(tmp_path / "recorder", "activations"))
    writer.begin(label="activations", group="activations")
    heads = {"a": [1.0, math.nan, 3.0], "b": [1.0, 2.0]}
    sites = {
        Site(name, "in.scores"): SiteStatistics(
            {"rms": 1.0},
            tensors={"attention_max_logit": torch.tensor(values), "attention_keys": torch.ones(len(values))},
        )
        for name, values in heads.items()
    }
    writer.write({"step": 0}, sites)
    open_recording(tmp_path).page(tmp_path / "page.html")
    opened(page, tmp_path / "page.html", "#show=heads of attention/attention_max_logit")
    pixels = page.locator(".cells canvas").evaluate(
        "(each) => [...each.getContext('2d').getImageData(0, 0, 3, 2).data]"
    )
    colors = np.array(pixels).reshape(2, 3, 4)[..., :3].tolist()
    assert (colors[0][1], colors[1][2]) == ([0xD6, 0x00, 0x8B], [0xA0, 0xA4, 0xAA])
    assert len({tuple(each) for row in colors for each in row}) == 5


def test_costs_are_over_steps(page: Page, parts: Path) -> None:
    """Time and memory of each module are statistics of their own; a module stands for all that is inside of it."""
    run = open_recording(parts / "healthy").run
    series, step = run["costs"], run["costs"].steps[-1]
    opened(page, parts / "healthy.html", f"#show=costs/forward_ms&step={step}&layer=blocks.1.attn")
    assert set(page.get_by_label("statistic", exact=True).locator("option").all_inner_texts()) == {
        site.path for site in series.sites
    }
    expect(page.locator(".cells canvas")).to_have_attribute("width", str(len(series.steps)))
    for cost in ("forward_ms", "backward_ms", "saved_bytes"):
        value = series["blocks.1.attn", cost].statistic("mean")[-1].item()
        chart = page.locator("aside.layer figcaption", has_text=f"{cost}: ")
        text = chart.locator("span").first.inner_text().split(": ")[1].split(" at ")[0]
        assert float(text.replace(",", "")) == pytest.approx(value, rel=1e-3)


def test_strips_of_heads_and_costs_are_accessible(page: Page, parts: Path) -> None:
    """The checks of axe-core find nothing in either theme, with and without a layer."""
    for name, place in (
        ("dead head", ""),
        ("starved", "#layer=blocks.2.mlp.topk"),
        ("healthy", "#show=costs/forward_ms"),
    ):
        opened(page, parts / f"{name}.html", place)
        page.locator(".cells").focus()
        page.keyboard.press("ArrowDown")
        for theme in ("light", "dark"):
            page.emulate_media(color_scheme=theme)
            found = Axe().run(page).response["violations"]
            assert [(each["id"], each["nodes"][0]["html"]) for each in found] == []
    page.emulate_media(color_scheme="light")
