"""The layout of a Graphviz document in a child process."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from xml.sax.saxutils import escape

from lightning_recorder.errors import RenderError
from lightning_recorder.fonts import BOLD, REGULAR
from lightning_recorder.temporary import TemporaryFolder, copy_whole

__all__ = ["Layout", "find_renderer"]

# Below this scale the smallest text, of 10 points, is less than 9 pixels high.
_LEAST_SCALE = 0.68

# Run Python in isolated mode, so that neither the working directory nor the user's start-up files have an effect.
# Therefore the script gets the path of pygraphviz as an argument.
_SCRIPT = [sys.executable, "-I", str(Path(__file__).with_name("layout_process.py"))]
# All documents of GraphvizRenderer contain this text. Other documents are passed to dot directly.
_SCRIPTED = "newrank=true"

_NO_RENDERER = (
    "Graphviz was not found: install the package pygraphviz (pip install pygraphviz), whose wheels include it, "
    "or put dot on PATH"
)


class Layout:
    """Lays out a document with Graphviz in a child process, while the training continues.

    ``dot`` is used if it is on PATH, otherwise the Graphviz inside ``pygraphviz``. No picture appears before all
    pictures are complete.

    Args:
        document: The path of the ``.dot`` file.
        formats: Graphviz formats. The pictures are written beside the document, with these suffixes.
        timeout_s: Seconds after which the process is killed.

    Raises:
        RenderError: If no renderer is installed. The message says how to install one.

    Note:
        The child is a plain subprocess. A ``multiprocessing`` process would import the training script again, and the
        script may have no ``__main__`` guard. The child has its own session, so that Ctrl-C in the terminal does not
        kill it before its picture is complete. If this process is killed, the child ends after ``timeout_s`` seconds of
        CPU time (on Linux), and the next layout on this machine removes its files.
    """

    def __init__(self, document: str | Path, formats: Sequence[str], timeout_s: float = 60.0) -> None:
        document = Path(document)
        self.pictures = [document.with_suffix(f".{each}") for each in formats]
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._late = False
        command = find_renderer()
        if command is None:
            raise RenderError(_NO_RENDERER)
        try:
            folder = TemporaryFolder()
        except OSError as error:
            raise RenderError(f"Graphviz could not be started: {error}") from error
        try:
            self._made = [folder.path / path.name for path in self.pictures]
            self._messages = folder.path / "messages.txt"
            arguments = _arguments(command, document, self._made)
            environment = {**os.environ, "FONTCONFIG_FILE": str(_font_configuration(folder.path))}
            with self._messages.open("wb") as messages:
                self._process = subprocess.Popen(
                    arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=messages,
                    stderr=messages,
                    env=environment,
                    start_new_session=True,
                )
        except OSError as error:
            folder.remove()
            raise RenderError(f"Graphviz could not be started: {error}") from error
        self._discard = weakref.finalize(self, _discard, self._process, folder)
        _limit_processor_time(self._process.pid, timeout_s)

    def done(self) -> bool:
        """Return True if the process has ended, successfully or not.

        This does not block. A process past its deadline is killed.
        """
        if self._process.poll() is None and time.monotonic() > self._deadline:
            self._end()
        return self._process.poll() is not None

    def finish(self, wait_s: float | None = None) -> list[Path]:
        """Wait for the process and return the paths of the pictures.

        Args:
            wait_s: Seconds to wait before the process is killed; by default, the time that is left of ``timeout_s``.

        Raises:
            RenderError: If the renderer failed or timed out, or if the text of a bitmap would be too small to read. The
                message has the end of the renderer's output.
        """
        try:
            left = max(0.0, self._deadline - time.monotonic())
            try:
                self._process.wait(left if wait_s is None else min(wait_s, left))
            except subprocess.TimeoutExpired:
                self._end()
            if self._process.returncode != 0 or not all(path.exists() for path in self._made):
                words = self._messages.read_text(errors="replace").strip()[-500:]
                unknown = re.search(r'Format: "(\S*?)" not recognized', words)
                if unknown:
                    raise RenderError(
                        f"Graphviz has no format {unknown[1]}: choose svg, png, pdf, or json for the graph"
                    )
                limit = f"it was stopped after {self._timeout_s:g} s; draw a smaller view"
                late = limit if self._late else "it failed"
                raise RenderError(f"Graphviz produced no picture, {late}" + (f": {words}" if words else ""))
            self._check_size()
            for made, path in zip(self._made, self.pictures, strict=True):
                copy_whole(made, path)
            return self.pictures
        finally:
            self._discard()

    def _check_size(self) -> None:
        """Raise an error if Graphviz has shrunk a bitmap to its maximum size, so that its text is unreadable."""
        words = self._messages.read_text(errors="replace")
        scale = min((float(each) for each in re.findall(r"[Ss]caling by (\d*\.?\d+)", words)), default=1.0)
        if scale < _LEAST_SCALE:
            raise RenderError(
                f"a bitmap of so large a graph would be shrunk to {scale:.0%}, its text too small to read: draw a "
                "smaller view, or choose the format svg"
            )

    def _end(self) -> None:
        self._late = True
        _kill(self._process)


def find_renderer() -> list[str] | None:
    """Return the command that lays out a document, without its arguments; ``None`` if no renderer is installed."""
    dot = shutil.which("dot")
    if dot:
        return [dot]
    spec = importlib.util.find_spec("pygraphviz")
    if spec is None or spec.origin is None or not sys.executable:
        return None
    return [*_SCRIPT, str(Path(spec.origin).parent.parent)]


def _arguments(command: Sequence[str], document: Path, made: Sequence[Path]) -> list[str]:
    """Return the command line that renders the pictures of a document."""
    if len(command) > 1:
        return [*command, str(document), *map(str, made)]
    source = document.read_text(encoding="utf-8")
    if sys.executable and _SCRIPTED in source:
        return [*_SCRIPT, *command, str(document), *map(str, made)]
    outputs = [f"-{option}{value}" for path in made for option, value in (("T", path.suffix[1:]), ("o", path))]
    return [*command, *outputs, str(document)]


def _font_configuration(folder: Path) -> Path:
    """Write a font configuration that includes the package's fonts, and return its path.

    On a machine without fonts, Graphviz would draw empty boxes for the letters. The fonts are copied, since some
    releases of fontconfig write a file into each font directory.
    """
    copies = folder / "fonts"
    copies.mkdir()
    for font in (REGULAR, BOLD):
        shutil.copyfile(font, copies / font.name)
    configuration = folder / "fonts.conf"
    configuration.write_text(
        f'<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd"><fontconfig><dir>{escape(str(copies))}</dir>'
        f"<cachedir>{escape(str(folder / 'cache'))}</cachedir></fontconfig>",
        encoding="utf-8",
    )
    return configuration


def _limit_processor_time(pid: int, seconds: float) -> None:
    """Let the operating system kill a process after this CPU time, even if its parent was killed."""
    if sys.platform == "linux":
        import resource

        most = math.ceil(seconds)
        # The process may have ended, or an administrator may have set a lower limit.
        with suppress(OSError, ValueError):
            resource.prlimit(pid, resource.RLIMIT_CPU, (most, most))


def _discard(process: subprocess.Popen[bytes], folder: TemporaryFolder) -> None:
    """Kill a process if it is still running, and remove its files."""
    _kill(process)
    folder.remove()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its process group, which includes the dot process that it may have started."""
    if process.poll() is None and sys.platform != "win32":
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
