"""The links of an SVG to the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_recorder.graph import draw
from lightning_recorder.graph.renderers.details import source_link
from tests.graph.nets import X, linear

HERE = "tests/graph/renderers/test_source_link.py"


@pytest.mark.parametrize(
    ("source", "template", "expected"),
    [
        (f"{HERE}:3", "vscode://file/{path}:{line}", f"vscode://file{Path(__file__).resolve().as_posix()}:3"),
        (f"{HERE}:3", "https://x.y/{file}#L{line}", f"https://x.y/{HERE}#L3"),
        ("not/there.py:3", "vscode://file/{path}:{line}", ""),
        ("not/there.py:3", "https://x.y/{file}#L{line}", "https://x.y/not/there.py#L3"),
        ('a" onclick="b.py:3', "https://x.y/{file}#L{line}", "https://x.y/a%22%20onclick%3D%22b.py#L3"),
        ("", "https://x.y/{file}#L{line}", ""),
        ("net.py", "https://x.y/{file}#L{line}", ""),
    ],
)
def test_addresses(source: str, template: str, expected: str) -> None:
    """A template is filled with the quoted path and the line; without a line or an existing file there is no link."""
    if "vscode" in expected:
        assert source_link(source, template).startswith("vscode://file/")
        assert source_link(source, template).endswith(f"{HERE}:3")
    else:
        assert source_link(source, template) == expected


def test_installed_packages_are_found() -> None:
    """The line of a layer of torch is in the folder of the installed packages."""
    file = Path(torch.__file__).with_name("functional.py").resolve().as_posix()
    assert source_link("torch/functional.py:7") == f"vscode://file/{file.lstrip('/')}:7"


def test_links_of_a_picture(tmp_path: Path) -> None:
    """Each call of an SVG links to its line, by default for VS Code; a template replaces it, and None removes it."""
    net = nn.Sequential(linear(), nn.ReLU())
    links = {}
    given: dict[str, dict[str, Any]] = {
        "default": {},
        "template": {"link": "https://x.y/{file}?l={line}&z"},
        "none": {"link": None},
    }
    for name, options in given.items():
        svg = draw(net, X, **options).save(tmp_path / "graph.svg").read_text(encoding="utf-8")
        links[name] = re.findall(r'xlink:href="([^"]*)"', svg)
    assert [link.partition(":")[0] for link in links["default"]] == ["vscode", "vscode"]
    assert all(re.fullmatch(rf"https://x\.y/{re.escape(HERE)}\?l=\d+&amp;z", link) for link in links["template"])
    assert (len(links["template"]), links["none"]) == (2, [])
