"""Chromium, driven without a window and without a network."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Page, sync_playwright

__all__ = ["CHROMIUM", "open_page"]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@contextmanager
def open_page() -> Iterator[Page]:
    """A page of 1,400 × 900 in a browser with a profile of its own."""
    with sync_playwright() as driver, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = driver.chromium.launch_persistent_context(
            profile, executable_path=CHROMIUM, headless=True, args=_FLAGS, viewport={"width": 1400, "height": 900}
        )
        try:
            yield browser.pages[0]
        finally:
            browser.close()
