"""A function call in a separate process, so that drawing does not hold the GIL of the training process."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_recorder.temporary import TemporaryFolder

__all__ = ["DrawingProcess"]

_SCRIPT = "import sys; from lightning_recorder.plots.process import main; main(sys.argv[1])"
_NICENESS = 10
_TIMEOUT_S = 300.0  # the process is killed after this time


class DrawingProcess:
    """Starts a new interpreter that calls a function. The constructor returns at once.

    The process is not a fork, so it may be started while other threads run, and it does not import the user's script.
    It does not use a GPU, has a low priority, and ends on its own if this process is killed.

    Args:
        function: A function of this package that can be pickled by its name.
        arguments: The arguments of the function.

    Raises:
        OSError: If the process cannot be started.
        Exception: If an argument cannot be pickled.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        if not sys.executable:
            raise OSError("the path of the Python interpreter is unknown")
        content = pickle.dumps((function, arguments))
        self._deadline = time.monotonic() + _TIMEOUT_S
        folder = TemporaryFolder()
        self._result = folder.path / "result"
        try:
            (folder.path / "call").write_bytes(content)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SCRIPT, str(folder.path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=_environment(),
                start_new_session=True,
            )
        except OSError:
            folder.remove()
            raise
        self._discard = weakref.finalize(self, _discard, self._process, folder)

    def done(self) -> bool:
        """Return True if the process has ended, successfully or not. This does not block."""
        if time.monotonic() > self._deadline:
            self._process.kill()
            self._process.wait()
        return self._process.poll() is not None

    def wait(self) -> None:
        """Wait until the process has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, self._deadline - time.monotonic()))

    def finish(self) -> tuple[Any, float]:
        """Return the result of the function, and the CPU time of the process in seconds.

        If the process is still running, it is killed.

        Raises:
            OSError: If the process has failed or was killed.
        """
        try:
            if not self.done() or self._process.returncode != 0:
                raise OSError(f"the process that draws has ended with status {self._process.returncode}")
            with self._result.open("rb") as file:
                found: tuple[Any, float] = pickle.load(file)
            return found
        finally:
            self._discard()


def _environment() -> dict[str, str]:
    paths = [path or str(Path.cwd()) for path in sys.path]
    more = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **more}


def _discard(process: subprocess.Popen[bytes], folder: TemporaryFolder) -> None:
    process.kill()
    process.wait()
    folder.remove()


def main(directory: str) -> None:
    """Call the function that is pickled in the folder, and write its result. This runs in the new process."""
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    folder = Path(directory)
    function, arguments = pickle.loads((folder / "call").read_bytes())
    found = pickle.dumps((function(*arguments), time.process_time()))
    (folder / "result").write_bytes(found)
