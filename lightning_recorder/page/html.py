"""The page as one HTML file that needs neither a network nor a server."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from html import escape
from importlib import resources
from typing import Any

from lightning_recorder.notebook import framed

__all__ = ["PageDocument", "encoded", "page_html"]

_LEVEL = 6  # the level of gzip; level 9 saves 2 % and takes three times as long


def encoded(data: Mapping[str, Any]) -> str:
    """Return the data of the page as text: gzip of JSON, in base64.

    The text has no special characters of HTML, whatever names the data contain.
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), _LEVEL, mtime=0)).decode()


def page_html(data: Mapping[str, Any], title: str) -> str:
    """Return the page as HTML.

    The Content-Security-Policy of the page allows no remote address. With ``live`` in the data, it allows only the
    page's server.

    Args:
        data: The result of :func:`~lightning_recorder.page.data.page_data`.
        title: The title of the browser's tab.
    """
    script, style = _bundle()
    server = "'self'" if data.get("live") else "'none'"
    policy = (
        # The layout of the graph is computed by WebAssembly.
        f"default-src 'none'; script-src '{_digest(script)}' 'wasm-unsafe-eval'; style-src 'unsafe-inline'; "
        f"connect-src {server}; img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        '<div id="app">Loading the recording …</div>\n'
        f'<script type="text/plain" id="data">{encoded(data)}</script>\n'
        f'<script type="module">{script}</script>\n</body>\n</html>\n'
    )


class PageDocument(str):
    """The page as HTML. A notebook shows the page in an isolated frame."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<page of {len(self.encode()):,} bytes>"

    def _repr_html_(self) -> str:
        return framed(self, repr(self), height_px=620, allow="allow-scripts allow-downloads allow-popups")


@cache
def _bundle() -> tuple[str, str]:
    """Return the script and the style of the page, which ``nox -s page`` builds."""
    folder = resources.files("lightning_recorder.page")
    script, style = ((folder / name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    # A string in the script may contain the end tag of scripts.
    return script.replace("</script", "<\\/script"), style


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
