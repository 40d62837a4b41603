"""The built files of the page are those that its sources give."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import lightning_recorder

PAGE = Path(lightning_recorder.__file__).parent / "page"
NPM = shutil.which("npm")


@pytest.mark.slow
@pytest.mark.skipif(NPM is None, reason="no npm on PATH; `nox -s page` installs one")
def test_the_bundle_is_built_from_the_sources(tmp_path: Path) -> None:
    """Types are right, and a build with the pinned packages gives page.js and page.css to the byte."""
    source = tmp_path / "source"
    shutil.copytree(PAGE / "source", source, ignore=shutil.ignore_patterns("node_modules"))
    options = ["--no-audit", "--no-fund", "--ignore-scripts"]
    installed = subprocess.run(
        [str(NPM), "ci", *options], cwd=source, capture_output=True, text=True, timeout=300, check=False
    )
    if installed.returncode:
        pytest.skip(f"the npm packages cannot be installed: {installed.stderr[-200:]}")
    for script in ("check", "build"):
        subprocess.run([str(NPM), "run", script], cwd=source, check=True, capture_output=True, timeout=120)
    for name in ("page.js", "page.css"):
        assert (tmp_path / name).read_bytes() == (PAGE / name).read_bytes(), f"{name} is old; run nox -s page"
