"""Makes the pictures of the README from a run of the demo: python -m tests.browser.pictures."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, expect

from tests.browser.chromium import open_page
from tests.browser.server import get, get_json, tensorboard

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "examples" / "pictures"
HEAT_MAP = "gradients_plots/heat_map/rms"


def shoot(page: Page, address: str, tab: str, ready: str, target: Path) -> None:
    """Save what the page shows under one of its tabs."""
    page.goto(f"{address}/#{tab}")
    expect(page.locator(ready).first).to_be_visible(timeout=60_000)
    page.wait_for_timeout(4000)
    page.screenshot(path=target)


def shrink(path: Path) -> None:
    """Keep at most 128 colors: flat drawings lose nothing that is seen."""
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


def main() -> None:
    """Run the demo, serve it, and photograph it."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, ROOT / "examples" / "digits.py", folder], check=True)
        run = Path(folder) / "digits" / "version_0"
        (PICTURES / "digits-graph.png").write_bytes((run / "recorder" / "graph.png").read_bytes())
        with tensorboard(Path(folder) / "digits") as address, open_page() as page:
            get_json(address, "histograms/tags")
            shoot(page, address, "histograms", "tf-histogram-loader", PICTURES / "tensorboard-histograms.png")
            shoot(page, address, "images", "tf-image-loader img", PICTURES / "tensorboard-images.png")
            (*_, latest) = get_json(address, "images/images", run="version_0/recorder", tag=HEAT_MAP, sample=0)
            (PICTURES / "digits-heat-map.png").write_bytes(get(address, f"images/individualImage?{latest['query']}&"))
    for picture in PICTURES.glob("*.png"):
        shrink(picture)


if __name__ == "__main__":
    main()
