"""A real TensorBoard server over the results of a run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def tensorboard(folder: Path) -> Iterator[str]:
    """Serve a folder on a free port of the loopback interface; gives the address."""
    log = folder / "server.log"
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--port", "0", "--host", "127.0.0.1"]
    with log.open("w") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, "PYTHONUNBUFFERED": "1"}, stdin=subprocess.DEVNULL
        )
        try:
            yield _address(server, log)
        finally:
            server.terminate()
            server.wait(30)


def _address(server: subprocess.Popen[bytes], log: Path) -> str:
    for _ in range(600):
        found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
        if found:
            return found[0]
        if server.poll() is not None:
            break
        time.sleep(0.1)
    raise RuntimeError(f"TensorBoard did not start: {log.read_text()[-2000:]}")


def get(address: str, path: str, **query: object) -> bytes:
    """Return the answer of the server."""
    url = f"{address}/data/plugin/{path}?{urllib.parse.urlencode({key: str(value) for key, value in query.items()})}"
    with urllib.request.urlopen(url, timeout=60) as answer:
        content: bytes = answer.read()
        return content


def get_json(address: str, path: str, **query: object) -> Any:
    """Return the answer of the server, once it has read the files of the run."""
    for _ in range(300):
        answer = json.loads(get(address, path, **query))
        if answer:
            return answer
        time.sleep(0.1)
    raise RuntimeError(f"TensorBoard has nothing under {path}")
