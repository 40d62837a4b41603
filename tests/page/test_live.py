"""The page of a run that goes on, from its server and from TensorBoard."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import re
import shutil
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
import webbrowser
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Route, expect

from lightning_recorder.commands import view
from lightning_recorder.errors import DumpError
from lightning_recorder.page import live
from lightning_recorder.page.live import PageServer
from lightning_recorder.recordings import RecordWriter
from tests.browser.chromium import CHROMIUM, open_page
from tests.browser.server import tensorboard
from tests.commands.console import run as command
from tests.page.test_data import written
from tests.recordings.runs import site_of

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH; .ci/run installs one")


@pytest.fixture
def server(runs: Path, tmp_path: Path) -> Iterator[PageServer]:
    """The server of a copy of the healthy run."""
    shutil.copytree(runs / "healthy", tmp_path / "run")
    made = PageServer([tmp_path / "run"])
    thread = threading.Thread(target=made.serve, daemon=True)
    thread.start()
    yield made
    made.close()
    thread.join(10)


def asked(address: str, host: str | None = None) -> HTTPResponse:
    """Return the answer to a request."""
    request = urllib.request.Request(address, headers={} if host is None else {"Host": host})
    answer: HTTPResponse = urllib.request.urlopen(request, timeout=30)
    return answer


def decoded(answer: HTTPResponse) -> Any:
    """Return the data of an answer."""
    return json.loads(gzip.decompress(base64.b64decode(answer.read())))


def test_only_who_has_the_secret_sees_the_page(server: PageServer) -> None:
    """Without the secret, with another host name and for any other path the answer is 404."""
    assert asked(server.address).status == 200
    base = server.address.rsplit("/", 2)[0]
    for address, host in [
        (f"{base}/", None),
        (f"{base}/wrong/", None),
        (f"{server.address}../", None),
        (f"{server.address}graph.json", None),
        (server.address, "attacker.example"),
    ]:
        with pytest.raises(urllib.error.HTTPError, match="404"):
            asked(address, host)


def test_new_records_come_by_themselves(server: PageServer, tmp_path: Path) -> None:
    """The answer to a version that is current is 204; after a new record it has the record."""
    before = decoded(asked(f"{server.address}data"))
    query = urllib.parse.urlencode({"after": before["version"]})
    assert asked(f"{server.address}data?{query}").status == 204
    (path,) = (tmp_path / "run").rglob("records/activations.jsonl")
    writer = RecordWriter(path)
    writer.begin(label="activations", group="activations")
    writer.write({"step": 500}, [site_of("head", "out", {"rms": 1.0})])
    after = decoded(asked(f"{server.address}data?{query}"))
    steps = next(each for each in after["runs"][0]["recorders"] if each["label"] == "activations")["steps"]
    assert steps[-1] == 500


@pytest.fixture
def long_server(tmp_path: Path) -> Iterator[PageServer]:
    """The server of a run whose records have no room in the page."""
    written(tmp_path, [[float(row % 10), 2.0] for row in range(300)], ["a", "b"])
    made = PageServer([tmp_path], limit=100)
    thread = threading.Thread(target=made.serve, daemon=True)
    thread.start()
    yield made
    made.close()
    thread.join(10)


def test_all_records_of_a_site_come_on_demand(long_server: PageServer) -> None:
    """A site that the page shows with joined records is sent with all of them; an unknown one is an error."""
    (run,) = decoded(asked(f"{long_server.address}data"))["runs"]
    assert len(run["recorders"][0]["steps"]) < 300
    place = {"run": run["name"], "recorder": "activations", "stage": "train", "loader": "", "module": "a"}
    found = decoded(asked(f"{long_server.address}site?{urllib.parse.urlencode({**place, 'path': 'out'})}"))
    assert found["steps"] == list(range(300))
    values = np.frombuffer(base64.b64decode(found["statistics"]["rms"]), "<f4")
    assert values.tolist() == [float(row % 10) for row in range(300)]
    with pytest.raises(urllib.error.HTTPError, match="500"):
        asked(f"{long_server.address}site?{urllib.parse.urlencode({**place, 'path': 'nowhere'})}")


@needs_browser
@pytest.mark.browser
def test_an_open_panel_asks_for_all_records(long_server: PageServer) -> None:
    """The served page replaces the joined records of a layer by all of them when its panel opens."""
    with open_page() as page:
        asked_for: list[str] = []
        page.on("request", lambda request: asked_for.append(request.url))
        page.goto(f"{long_server.address}#layer=a")
        panel = page.locator("aside.layer")
        expect(panel).to_be_visible(timeout=20_000)
        expect(panel.locator("h3").first).not_to_contain_text("one point for", timeout=20_000)
        assert sum("/site?" in each for each in asked_for) == 1


def test_nothing_recorded_is_an_error_at_once(tmp_path: Path) -> None:
    """A folder without a recording is refused before there is a server."""
    with pytest.raises(DumpError, match="nothing was recorded"):
        PageServer([tmp_path])


def sent(server: PageServer, request: bytes) -> bytes:
    """Return the whole answer to the bytes of a request, until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", urllib.parse.urlsplit(server.address).port), timeout=60) as connection:
        connection.sendall(request)
        parts = iter(lambda: connection.recv(65536), b"")
        return b"".join(parts)


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GARBAGE", b"400"),
        (b"GET http://[ HTTP/1.1", b"400"),
        (b"GET /\xff\xfe HTTP/1.1", b"404"),
        (b"GET / HTTP/9.9", b"505"),
        (b"POST / HTTP/1.1", b"501"),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1", b"414"),
        (b"GET {secret}site?run=run&recorder=activations&loader=" + b"9" * 5000 + b" HTTP/1.1", b"500"),
        (b"GET {secret}data?run=%ED%A0%80 HTTP/1.1", b"500"),
    ],
    ids=lambda value: value[:20].decode("latin-1"),
)
def test_a_malformed_request_gets_a_status(
    request_line: bytes, status: bytes, server: PageServer, capfd: pytest.CaptureFixture[str]
) -> None:
    """A malformed request is answered with a status, prints nothing, and the next request works."""
    address = urllib.parse.urlsplit(server.address)
    line = request_line.replace(b"{secret}", address.path.encode())
    answer = sent(server, line + f"\r\nHost: {address.netloc}\r\n\r\n".encode())
    assert status in answer.partition(b"\r\n")[0] + answer[:300]
    assert asked(server.address).status == 200
    assert capfd.readouterr() == ("", "")


def test_half_requests_end_and_connections_are_limited(
    server: PageServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Connections beyond the limit are closed at once, those of half a request in time, and then the server answers."""
    monkeypatch.setattr(server._server.RequestHandlerClass, "timeout", 0.5)
    where = ("127.0.0.1", urllib.parse.urlsplit(server.address).port)
    half = [socket.create_connection(where, timeout=60) for _ in range(live._MOST_CONNECTIONS + 8)]
    for each in half:
        with contextlib.suppress(ConnectionError):  # one beyond the limit
            each.sendall(b"GET / HTT")
    for each in half:
        with contextlib.suppress(ConnectionError):
            assert each.recv(100) == b""
        each.close()
    assert asked(server.address).status == 200
    assert capfd.readouterr() == ("", "")


def test_the_time_limit_of_a_request_is_set(server: PageServer) -> None:
    """A connection that sends nothing ends after ten seconds."""
    assert vars(server._server.RequestHandlerClass)["timeout"] == 10.0


def test_a_taken_port_is_named_with_the_fix(server: PageServer, tmp_path: Path) -> None:
    """The error has the port and the option that chooses another one, and the exit status is 2."""
    port = urllib.parse.urlsplit(server.address).port
    said = command("view", tmp_path / "run", "--port", port, "--no-browser")
    assert (said.status, said.err.count("\n")) == (2, 1)
    assert f"port {port} cannot be used" in said.err
    assert "choose another one with --port" in said.err


def test_the_browser_is_started_without_the_secret(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address that the browser is started with, which all users can list, leads to the page once and then not."""
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr(view, "PageServer", lambda *args, **options: server)
    monkeypatch.setattr(server, "serve", lambda: None)
    assert command("view", "run").status == 0
    (address,) = opened
    secret = urllib.parse.urlsplit(server.address).path.strip("/")
    assert secret not in address
    assert f"url={server.address}" in asked(address).read().decode()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        asked(address)


@needs_browser
@pytest.mark.browser
def test_the_open_page_grows(server: PageServer, tmp_path: Path) -> None:
    """A record that is written while the page is open appears without a reload."""
    with open_page() as page:
        page.goto(server.address)
        expect(page.locator(".verdict")).to_be_visible(timeout=20_000)
        (path,) = (tmp_path / "run").rglob("records/activations.jsonl")
        writer = RecordWriter(path)
        writer.begin(label="activations", group="activations")
        writer.write({"step": 700}, [site_of("head", "out", {"rms": 1.0})])
        expect(page.locator("output")).to_have_text("step 700", timeout=20_000)


@needs_browser
@pytest.mark.browser
@pytest.mark.slow
def test_tensorboard_has_a_tab(runs: Path, tmp_path: Path) -> None:
    """TensorBoard shows the page in the tab Recorder, for any of its runs; without a recording there is no tab."""
    with tensorboard(runs) as address, open_page() as page:
        page.goto(f"{address}/#lightning_recorder")
        inner = page.frame_locator("iframe").first.frame_locator("iframe[title=Recorder]")
        expect(inner.locator(".verdict")).to_be_visible(timeout=60_000)
        listing = json.loads(asked(f"{address}/data/plugins_listing").read())
        assert listing["lightning_recorder"]["enabled"]
        names = decoded(asked(f"{address}/data/plugin/lightning_recorder/data"))["available"]
        sick = next(each for each in names if each.startswith("sick"))
        inner.get_by_label("run", exact=True).select_option(sick)
        expect(inner.locator(".findings")).to_contain_text("encoder.relu", timeout=30_000)
        # A link has the place on the page, and the tab says that it loads.
        held: list[Route] = []

        def hold(route: Route) -> None:
            held.append(route)

        page.route("**/lightning_recorder/page*", hold)
        page.goto("about:blank")
        with page.expect_request("**/lightning_recorder/page*", timeout=60_000):
            page.goto(f"{address}/#lightning_recorder&p.lightning_recorder.place=tab%3Dgraph")
        expect(page.frame_locator("iframe").first.get_by_role("status")).to_have_text("Loading the recording …")
        held.pop().continue_()
        expect(inner.get_by_role("tab", name="graph")).to_have_attribute("aria-selected", "true", timeout=60_000)
        expect(page.frame_locator("iframe").first.get_by_role("status")).to_have_count(0)
        inner.get_by_role("tab", name="overview").click()
        page.wait_for_url(re.compile("#lightning_recorder&.*tab%3Doverview"))
        page.evaluate("location.hash = location.hash.replace('tab%3Doverview', 'tab%3Dgraph')")
        expect(inner.get_by_role("tab", name="graph")).to_have_attribute("aria-selected", "true")
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        inner.get_by_role("button", name="copy link").click()
        expect(inner.get_by_text("copied; it works while the server runs")).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == page.url
    (tmp_path / "empty").mkdir()
    with tensorboard(tmp_path / "empty") as address:
        assert not json.loads(asked(f"{address}/data/plugins_listing").read())["lightning_recorder"]["enabled"]


def test_records_of_a_folder_are_read_once_if_nothing_changes(server: PageServer) -> None:
    """The data of two requests are the same object until a file changes."""
    one, other = (server._page.data() for _ in range(2))
    assert one is other
