"""The font of all pictures, DejaVu Sans 2.37, which Debian and others ship under the same licence (see ``LICENSE``)."""

from __future__ import annotations

from pathlib import Path

__all__ = ["BOLD", "FAMILY", "REGULAR"]

FAMILY = "DejaVu Sans"
"""The name of the font in Graphviz and in SVG."""

REGULAR = Path(__file__).with_name("DejaVuSans.ttf")
BOLD = Path(__file__).with_name("DejaVuSans-Bold.ttf")
