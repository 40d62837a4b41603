"""The page of runs that may still be in progress, and its server on this machine."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from typing_extensions import override

from lightning_recorder.errors import ArgumentError, describe_error
from lightning_recorder.names import closest_names
from lightning_recorder.page.data import page_data, site_data
from lightning_recorder.page.html import encoded, page_html
from lightning_recorder.page.runs import FEWEST_RUNS, runs_table, table_row
from lightning_recorder.recordings import Recording, Run, open_recording
from lightning_recorder.records.file import CHECK, FINDINGS

__all__ = ["LivePage", "PageServer"]

_ADDRESS = "127.0.0.1"
_LAST_PORT = 65535
_LONGEST_WAIT_S = 10.0  # the timeout for the next bytes of a request, and for a browser to accept bytes of an answer
_MOST_CONNECTIONS = 32
_WATCHED = ("records/*.jsonl", "graph.json", "receipt.json", CHECK, FINDINGS)


class LivePage:
    """The page and the data of the runs below some folders. Changed files are read again.

    Args:
        paths: The paths, each as for :func:`~lightning_recorder.open_recording`.
        limit: The number of bytes for all statistics, as for :func:`~lightning_recorder.page.page_data`.
    """

    def __init__(self, paths: Sequence[str | Path], limit: int = 10_000_000) -> None:
        self._paths = [Path(path) for path in paths]
        self._limit = limit
        self._lock = threading.Lock()
        self._recording: Recording | None = None
        self._rows: dict[str, tuple[str, dict[str, Any]]] = {}  # the rows of the table, with the version of each run
        self._known: tuple[tuple[str, ...], str, dict[str, Any]] | None = None

    def data(self, names: Sequence[str] = ()) -> dict[str, Any]:
        """Return the data of some runs; by default, of the latest run of each path.

        Raises:
            ArgumentError: If there is no such run.
            DumpError: If nothing was recorded, or a file is damaged.
        """
        with self._lock:
            return self._data(names)

    def _data(self, names: Sequence[str]) -> dict[str, Any]:
        runs = self._runs(names)
        every = self._recording.runs if self._recording else runs
        has_table = len(every) >= FEWEST_RUNS
        versions = {name: _version(run) for name, run in (every if has_table else runs).items()}
        version = hashlib.sha256(repr(versions).encode()).hexdigest()
        if self._known is None or self._known[:2] != (tuple(runs), version):
            for run in runs.values():
                run.refresh()
            rows = self._table(every, versions) if has_table else ()
            data = {**page_data(runs, limit=self._limit, table=rows), "live": True, "version": version}
            data["available"] = list(every)
            self._known = tuple(runs), version, data
        return self._known[2]

    def _table(self, runs: Mapping[str, Run], versions: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return the table of all runs. The rows of unchanged runs are reused."""
        before, self._rows = self._rows, {}
        for name, run in runs.items():
            known = before.get(name)
            self._rows[name] = (
                known if known is not None and known[0] == versions[name] else (versions[name], table_row(run))
            )
        return runs_table({name: row for name, (_, row) in self._rows.items()})

    def _runs(self, names: Sequence[str]) -> dict[str, Run]:
        opened = self._recording.runs if self._recording is not None else {}
        found: dict[str, Run] = {}
        latest: list[str] = []
        for path in self._paths:
            runs = {
                name if name not in found else str(run.log_dir): run for name, run in open_recording(path).runs.items()
            }
            # Runs that are already open are reused, with the records that they have read.
            found |= {name: opened.get(name, run) for name, run in runs.items()}
            latest.append(max(runs, key=lambda name: _changed(runs[name])))
        self._recording = Recording(found)
        unknown = [name for name in names if name not in found]
        if unknown:
            raise ArgumentError(f"there is no run {unknown[0]!r}; {closest_names(unknown[0], found)}")
        # Two runs are overlaid. With more, the page shows the run that changed last, and the table of all.
        newest = latest if len(latest) < FEWEST_RUNS else [max(latest, key=lambda name: _changed(found[name]))]
        return {name: found[name] for name in names or dict.fromkeys(newest)}

    def text(self, names: Sequence[str], after: str) -> str | None:
        """Return the encoded data, or ``None`` if their version is still ``after``."""
        data = self.data(names)
        return None if data["version"] == after else encoded(data)

    def site(self, asked: Mapping[str, Sequence[str]]) -> str:
        """Return all records of one site as encoded data.

        Args:
            asked: The values of ``run``, ``recorder``, ``stage``, ``loader``, ``module`` and ``path``.

        Raises:
            ArgumentError: If there is no such site.
            DumpError: If a file is damaged.
        """
        name, recorder, stage, loader, module, path = (
            asked.get(key, [""])[0] for key in ("run", "recorder", "stage", "loader", "module", "path")
        )
        with self._lock:
            series = self._runs([name])[name][recorder].of(stage, int(loader) if loader.isdecimal() else None)
            return encoded(site_data(series[module, path]))

    def html(self, names: Sequence[str] = ()) -> str:
        """Return the page."""
        data = self.data(names)
        return page_html(data, f"{data['runs'][0]['name']} · lightning_recorder")


def _version(run: Run) -> str:
    parts = []
    for pattern in _WATCHED:
        for path in sorted(run.directory.glob(pattern)):
            about = path.stat()
            parts.append(f"{path.name}:{about.st_size}:{about.st_mtime_ns}")
    return "|".join(parts)


def _changed(run: Run) -> int:
    times = [path.stat().st_mtime_ns for pattern in _WATCHED for path in run.directory.glob(pattern)]
    return max(times, default=0)


class PageServer:
    """A server for the page of runs, reachable only from this machine and only with the secret in its address.

    Args:
        paths: Each as for :func:`~lightning_recorder.open_recording`.
        port: The port; by default any free port.
        limit: The number of bytes for all statistics. The remaining records of a layer are sent when the layer is
            opened.

    Raises:
        ArgumentError: If the port is not a number from 0 to 65535, or is in use.
        DumpError: If nothing was recorded there.
    """

    def __init__(self, paths: Sequence[str | Path], port: int = 0, limit: int = 10_000_000) -> None:
        if not 0 <= port <= _LAST_PORT:
            raise ArgumentError(f"the port must be a number from 0 (any free one) to {_LAST_PORT}, got {port}")
        self._page = LivePage(paths, limit)
        self._page.data()  # raises errors here instead of in the browser
        self._token = secrets.token_urlsafe(16)
        self._once: list[str] = []
        try:
            self._server = _Server((_ADDRESS, port), self._handler())
        except OSError as error:
            raise ArgumentError(
                f"port {port} cannot be used ({error.strerror}): choose another one with --port, or leave it out for "
                "any that is free"
            ) from error

    @property
    def address(self) -> str:
        """The address of the page, with the secret."""
        return f"http://{_ADDRESS}:{self._server.server_port}/{self._token}/"

    def address_to_open_once(self) -> str:
        """Return an address without the secret that leads to the page once.

        The list of processes shows the address with which a browser is started to all users of the machine.
        """
        self._once.append(secrets.token_urlsafe(16))
        return f"http://{_ADDRESS}:{self._server.server_port}/{self._once[-1]}"

    def serve(self) -> None:
        """Answer requests until :meth:`close` is called."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, path: str, host: str) -> tuple[HTTPStatus, str, str]:
        """Return the status, the content type and the text of the answer to a request."""
        try:
            address = urlsplit(path)
        except ValueError:  # such as "http://["
            return HTTPStatus.BAD_REQUEST, "text/plain", "bad request"
        parts = address.path.split("/")
        hosts = (f"{_ADDRESS}:{self._server.server_port}", f"localhost:{self._server.server_port}")
        if host in hosts and address.path[1:] in self._once:
            with suppress(ValueError):  # another request may have used the address at the same time
                self._once.remove(address.path[1:])
                return HTTPStatus.OK, "text/html", f'<meta http-equiv="refresh" content="0;url={self.address}">'
        # Refuse the host names of other sites, even if they resolve to this machine.
        if host not in hosts or len(parts) != 3 or not hmac.compare_digest(parts[1].encode(), self._token.encode()):
            return HTTPStatus.NOT_FOUND, "text/plain", "not found"
        asked = parse_qs(address.query, keep_blank_values=True)
        names = asked.get("run", [])
        try:
            if parts[2] == "":
                return HTTPStatus.OK, "text/html", self._page.html(names)
            if parts[2] == "site":
                return HTTPStatus.OK, "text/plain", self._page.site(asked)
            if parts[2] == "data":
                text = self._page.text(names, asked.get("after", [""])[0])
                return (
                    (HTTPStatus.NO_CONTENT, "text/plain", "") if text is None else (HTTPStatus.OK, "text/plain", text)
                )
        except Exception as error:  # noqa: BLE001 - a browser gets the reason, and the next request may succeed
            return HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", describe_error(error)
        return HTTPStatus.NOT_FOUND, "text/plain", "not found"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        answer = self._answer

        class Handler(BaseHTTPRequestHandler):
            timeout = _LONGEST_WAIT_S

            def do_GET(self) -> None:
                status, kind, text = answer(self.path, self.headers.get("Host", ""))
                body = text.encode(errors="replace")
                self.send_response(status)
                self.send_header("Content-Type", f"{kind}; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "no-store")
                self.send_header("X-Content-Type-Options", "nosniff")
                self.send_header("Referrer-Policy", "no-referrer")
                with suppress(OSError):  # the browser no longer needs the answer
                    self.end_headers()
                    self.wfile.write(body)

            @override
            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing, since the address contains the secret."""

        return Handler


class _Server(ThreadingHTTPServer):
    """A server that limits the number of connections and prints no tracebacks."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)

    @override
    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._free.release()
            raise

    @override
    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing, since a broken connection is not an error of the user."""
