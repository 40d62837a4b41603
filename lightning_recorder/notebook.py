"""Documents inside a notebook."""

from __future__ import annotations

from html import escape

__all__ = ["framed"]


def framed(html: str, *, height_px: int, allow: str = "allow-popups") -> str:
    """Return an HTML document as a frame inside another one, which shares no names, styles and rights with it.

    Args:
        html: The document.
        height_px: The height of the frame. Its width is that of the place around it.
        allow: What the document may do, as for the attribute ``sandbox``.
    """
    style = f"width:100%;height:{height_px}px;border:1px solid #8888;border-radius:6px"
    return f'<iframe sandbox="{allow}" style="{style}" srcdoc="{escape(html)}"></iframe>'
