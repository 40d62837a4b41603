"""Entry points of the working tree, for environments whose installed copy is older."""

from __future__ import annotations

import configparser
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]


def write_entry_points(folder: Path) -> Path:
    """Write the metadata of an installed package with the entry points of pyproject.toml, and return the folder."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    about = folder / "lightning_recorder-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning-recorder\nVersion: 0\n")
    written = configparser.ConfigParser()
    written.read_dict({"console_scripts": project["scripts"], **project["entry-points"]})
    with (about / "entry_points.txt").open("w") as file:
        written.write(file)
    return folder
