"""Documents inside a notebook, and the code of its cells."""

from __future__ import annotations

import sys
from html import escape

__all__ = ["cell_or_path", "framed"]


def cell_or_path(path: str) -> str:
    """Return the path of a file of code as IPython names it in errors: ``Cell In[3]`` for a cell of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    format_name = getattr(getattr(shell, "compile", None), "format_code_name", None)
    found = None if format_name is None else format_name(path)
    return path if found is None else " ".join(found)


def framed(html: str, title: str, *, height_px: int, allow: str = "allow-popups") -> str:
    """Return an HTML document as a frame inside another one, which shares no names, styles and rights with it.

    A viewer that removes frames, as in a notebook that is not trusted, shows the title. ``allow`` are the permissions
    of the document, as for the attribute ``sandbox``.
    """
    style = f"width:100%;height:{height_px}px;border:1px solid #8888;border-radius:6px"
    instead = escape(f"{title}: trust the notebook")
    return f'<iframe sandbox="{allow}" style="{style}" srcdoc="{escape(html)}">{instead}</iframe>'
