"""From a Graphviz document to pictures, in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from lightning_recorder.errors import RenderError

__all__ = ["Layout", "find_renderer"]

# Below it the smallest text, of 10 points, has less than 9 pixels.
_LEAST_SCALE = 0.68

# Runs in the child: reads the document and writes each picture. It imports neither torch nor this package, so it starts
# in 0.1 s.
_CHILD = """
import sys
sys.path.append(sys.argv[1])
import pygraphviz
graph = pygraphviz.AGraph(filename=sys.argv[2])
for path in sys.argv[3:]:
    picture = graph.draw(format=path.rpartition(".")[2], prog="dot")
    with open(path, "wb") as file:
        file.write(picture)
"""

_NO_RENDERER = (
    "no Graphviz was found: install the package pygraphviz (pip install pygraphviz), whose wheels carry it, "
    "or put dot on PATH"
)


class Layout:
    """A picture in the making: Graphviz runs in a child process while the training goes on.

    ``dot`` is used where it is on PATH, else the Graphviz inside ``pygraphviz``. The pictures appear under their names
    when all of them are complete.

    Args:
        document: The ``.dot`` file.
        formats: Formats of Graphviz; the pictures lie beside the document with these suffixes.
        timeout_s: Seconds after which the process is ended.

    Raises:
        RenderError: If there is no renderer; the message says how to get one.

    Note:
        A plain child and not ``multiprocessing``: that would import the training script anew, which may not be guarded
        against it.
    """

    def __init__(self, document: str | Path, formats: Sequence[str], timeout_s: float = 60.0) -> None:
        document = Path(document)
        self.pictures = [document.with_suffix(f".{each}") for each in formats]
        self._temporary = [path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}") for path in self.pictures]
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        command = find_renderer()
        if command is None:
            raise RenderError(_NO_RENDERER)
        if len(command) == 1:
            outputs = [
                f"-{option}{value}"
                for path in self._temporary
                for option, value in (("T", path.suffix[1:]), ("o", path))
            ]
            arguments = [*command, *outputs, str(document)]
        else:
            arguments = [*command, str(document), *map(str, self._temporary)]
        self._scratch = tempfile.TemporaryDirectory(prefix="lightning-recorder-")
        self._messages = Path(self._scratch.name, "messages.txt")
        self._late = False
        environment = _environment(Path(self._scratch.name))
        with self._messages.open("wb") as messages:
            try:
                self._process = subprocess.Popen(
                    arguments, stdin=subprocess.DEVNULL, stdout=messages, stderr=messages, env=environment
                )
            except OSError as error:
                self._scratch.cleanup()
                raise RenderError(f"Graphviz could not be started: {error}") from error

    def done(self) -> bool:
        """Whether there is an end, good or bad; never waits, and ends a process that has had its time."""
        if self._process.poll() is None and time.monotonic() > self._deadline:
            self._end()
        return self._process.poll() is not None

    def finish(self, wait_s: float | None = None) -> list[Path]:
        """Wait for the end and give the pictures.

        Args:
            wait_s: Seconds to wait, then the process is ended; by default all of the time that it has left.

        Raises:
            RenderError: If the renderer failed or took too long, with its last words, or if a bitmap cannot be read.
        """
        try:
            left = max(0.0, self._deadline - time.monotonic())
            self._process.wait(left if wait_s is None else min(wait_s, left))
        except subprocess.TimeoutExpired:
            self._end()
        try:
            if self._process.returncode != 0 or not all(path.exists() for path in self._temporary):
                words = self._messages.read_text(errors="replace").strip()[-500:]
                limit = f"it was ended, having {self._timeout_s:g} s at most; a smaller view takes less"
                late = limit if self._late else "it failed"
                raise RenderError(f"Graphviz gave no picture, {late}" + (f": {words}" if words else ""))
            self._check_size()
            for temporary, path in zip(self._temporary, self.pictures, strict=True):
                temporary.replace(path)
            return self.pictures
        finally:
            for temporary in self._temporary:
                temporary.unlink(missing_ok=True)
            self._scratch.cleanup()

    def _check_size(self) -> None:
        """Refuse pictures whose text nobody can read, because Graphviz has shrunk them to what a bitmap can hold."""
        words = self._messages.read_text(errors="replace")
        scale = min((float(each) for each in re.findall(r"[Ss]caling by (\d*\.?\d+)", words)), default=1.0)
        if scale < _LEAST_SCALE:
            raise RenderError(
                f"a bitmap of so large a graph would be shrunk to {scale:.0%}, its text too small to read: draw a "
                "smaller view, or choose the format svg"
            )

    def _end(self) -> None:
        self._late = True
        self._process.kill()
        self._process.wait()


def find_renderer() -> list[str] | None:
    """The command that lays out a document, without its arguments; ``None`` where there is none."""
    dot = shutil.which("dot")
    if dot:
        return [dot]
    spec = importlib.util.find_spec("pygraphviz")
    if spec is None or spec.origin is None or not sys.executable:
        return None
    # Isolated, so that neither the folder of the run nor the user's start-up files have a say; hence the path of the
    # package as an argument.
    return [sys.executable, "-I", "-c", _CHILD, str(Path(spec.origin).parent.parent)]


def _environment(scratch: Path) -> dict[str, str]:
    """The environment, with a font configuration that finds DejaVu inside matplotlib.

    A bare machine has no fonts, and Graphviz would draw empty boxes for the letters.
    """
    spec = importlib.util.find_spec("matplotlib")
    if spec is None or spec.origin is None:
        return dict(os.environ)
    fonts = Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf"
    configuration = scratch / "fonts.conf"
    configuration.write_text(
        f'<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd"><fontconfig><dir>{escape(str(fonts))}</dir>'
        f"<cachedir>{escape(str(scratch / 'cache'))}</cachedir></fontconfig>",
        encoding="utf-8",
    )
    return {**os.environ, "FONTCONFIG_FILE": str(configuration)}
