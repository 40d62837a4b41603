"""TensorBoard, as a person sees it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.browser.chromium import CHROMIUM, open_page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH; .ci/run installs one"),
]


@pytest.fixture
def page() -> Iterator[Page]:
    """A page in a browser of its own."""
    with open_page() as opened:
        yield opened


def test_the_images_tab_shows_the_graph(page: Page, address: str) -> None:
    """Under Images the picture of the graph is loaded and drawn, upright and not squeezed."""
    page.goto(f"{address}/#images")
    picture = page.locator("tf-image-loader img").first
    expect(picture).to_be_visible(timeout=60_000)
    page.wait_for_function("element => element.complete && element.naturalWidth > 0", arg=picture.element_handle())
    natural, shown = (
        picture.evaluate(f"image => [image.{kind}Width, image.{kind}Height]") for kind in ("natural", "client")
    )
    assert natural[1] > natural[0] > 200
    assert shown[0] / shown[1] == pytest.approx(natural[0] / natural[1], rel=0.02)


def test_the_page_has_one_group_for_the_recorders(page: Page, address: str) -> None:
    """In the time series, all tags of the recorders are in one group."""
    page.goto(f"{address}/#timeseries")
    expect(page.locator("metrics-card-group-toolbar", has_text="z_recorder").first).to_be_visible(timeout=60_000)
    for group in ("activations", "gradients", "graph"):
        expect(page.locator("metrics-card-group-toolbar", has_text=group)).to_have_count(0)


def test_the_graphs_tab_opens_module_calls(page: Page, address: str) -> None:
    """Under Graphs the calls of the model's children are drawn, and a double click on one shows what it holds."""
    page.goto(f"{address}/#graphs")
    encoder = page.locator('g.node[data-name="encoder"]')
    expect(encoder).to_be_visible(timeout=60_000)
    for name in ("batch_0", "dropout", "head", "cross_entropy", "backward"):
        expect(page.locator(f'g.node[data-name="{name}"]')).to_be_visible()
    expect(page.locator('g.node[data-name="encoder/conv1"]')).to_have_count(0)
    # The picture is small on the page, so the event goes to what would be under the pointer.
    encoder.locator(".nodecolortarget").first.dispatch_event("dblclick")
    expect(page.locator('g.node[data-name="encoder/conv1"]')).to_be_visible()
    expect(page.locator('g.node[data-name="encoder/norm"]')).to_be_visible()
