"""HTML documents in notebooks, and the names of notebook cells."""

from __future__ import annotations

import sys
from html import escape

__all__ = ["cell_or_path", "framed"]


def cell_or_path(path: str) -> str:
    """Return the path of a code file; for a notebook cell, the name in IPython's messages, such as ``Cell In[3]``."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    format_name = getattr(getattr(shell, "compile", None), "format_code_name", None)
    found = None if format_name is None else format_name(path)
    return path if found is None else " ".join(found)


def framed(html: str, title: str, *, height_px: int, allow: str = "allow-popups") -> str:
    """Return an HTML document as a sandboxed frame, which shares no names, styles or rights with the outer document.

    A viewer that removes frames, as in an untrusted notebook, shows the title. ``allow`` is the value of the frame's
    ``sandbox`` attribute.
    """
    style = f"width:100%;height:{height_px}px;border:1px solid #8888;border-radius:6px"
    instead = escape(f"{title}: trust the notebook")
    return f'<iframe sandbox="{allow}" style="{style}" srcdoc="{escape(html)}">{instead}</iframe>'
