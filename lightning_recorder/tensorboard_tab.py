"""The tab "Recorder" of TensorBoard, found through the entry-point group ``tensorboard_plugins``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tensorboard.plugins import base_plugin
from typing_extensions import override
from werkzeug.wrappers import Request, Response

from lightning_recorder.errors import describe_error

if TYPE_CHECKING:
    from lightning_recorder.page.live import LivePage

__all__ = ["RecorderTab"]

_NAME = "lightning_recorder"
_RECORDER = "recorder"
_DEEPEST = 8  # number of folder levels to search, as in open_recording
_PAUSE_S = 15.0  # pause between two searches for a first recording
# TensorBoard's URL contains the position on the page, so that a copied URL leads to the same position. TensorBoard
# keeps URL parameters with the prefix "p.". The page changes its own URL without an event, so the script compares URLs.
_SCRIPT = """\
const START = "#lightning_recorder", PLACE = "p.lightning_recorder.place";
const asked = () => parent.location.hash.startsWith(START)
  ? new URLSearchParams(parent.location.hash.slice(1)).get(PLACE) ?? "" : "";
export async function render() {
  document.body.style.margin = "0";
  const said = document.createElement("p"), frame = document.createElement("iframe");
  said.textContent = "Loading the recording \u2026";
  said.setAttribute("role", "status");
  said.style = "margin:0;padding:1em;font:14px sans-serif;position:absolute";
  frame.src = "./page" + (asked() && "#" + asked());
  frame.title = "Recorder";
  frame.style = "border:0;width:100vw;height:100vh;display:block;visibility:hidden";
  document.body.append(said, frame);
  await new Promise((resolve) => frame.addEventListener("load", resolve, { once: true }));
  said.remove();
  frame.style.visibility = "visible";
  const page = frame.contentWindow;
  let shown = asked();
  parent.addEventListener("hashchange", () => {
    if (asked() && asked() !== shown) page.location.hash = shown = asked();
  });
  setInterval(() => {
    const place = page.location.hash.slice(1);
    if (!place || place === shown || !parent.location.hash.startsWith(START)) return;
    shown = place;
    parent.history.replaceState(parent.history.state, "", `${START}&${PLACE}=${encodeURIComponent(place)}`);
  }, 300);
}
"""


class RecorderTab(base_plugin.TBPlugin):  # type: ignore[misc]  # TensorBoard has no types
    """The TensorBoard plugin that shows the page of the runs below ``--logdir``."""

    plugin_name = _NAME

    def __init__(self, context: Any) -> None:
        self._logdir: str | None = context.logdir or None
        self._page: LivePage | None = None
        self._found = False
        self._searched = float("-inf")

    @override
    def is_active(self) -> bool:
        """Return True if there is a recording below the log folder. Searches at most every 15 s."""
        if not self._found and self._logdir and time.monotonic() - self._searched > _PAUSE_S:
            self._found = _has_recording(self._logdir)
            self._searched = time.monotonic()
        return self._found

    @override
    def frontend_metadata(self) -> Any:
        return base_plugin.FrontendMetadata(es_module_path="/index.js", tab_name="Recorder", disable_reload=True)

    @override
    def get_plugin_apps(self) -> dict[str, Callable[..., Any]]:
        return {"/index.js": self._index, "/page": self._answer, "/data": self._answer, "/site": self._answer}

    @Request.application  # type: ignore[arg-type]  # it also takes methods
    def _index(self, request: Request) -> Response:
        return Response(_SCRIPT, content_type="application/javascript")

    @Request.application  # type: ignore[arg-type]  # it also takes methods
    def _answer(self, request: Request) -> Response:
        try:
            page = self._opened()
            names = request.args.getlist("run")
            if request.path.endswith("/page"):
                return Response(page.html(names), content_type="text/html")
            if request.path.endswith("/site"):
                return Response(page.site(dict(request.args.lists())), content_type="text/plain")
            text = page.text(names, request.args.get("after", ""))
            return Response(status=204) if text is None else Response(text, content_type="text/plain")
        except Exception as error:  # noqa: BLE001 - show the reason in the browser; the next request may succeed
            reason = describe_error(error).encode(errors="replace")
            return Response(reason, status=500, content_type="text/plain")

    def _opened(self) -> LivePage:
        if self._page is None:
            # Imported here because it imports torch, which a TensorBoard without recordings must not wait for.
            from lightning_recorder.page.live import LivePage

            self._page = LivePage([str(self._logdir)])
        return self._page


def _has_recording(logdir: str) -> bool:
    base = logdir.rstrip(os.sep).count(os.sep)
    for place, folders, _ in os.walk(logdir):
        if _RECORDER in folders or place.endswith(os.sep + _RECORDER):
            return True
        if place.count(os.sep) - base >= _DEEPEST - 1:
            folders.clear()
        folders[:] = [each for each in folders if not each.startswith(".")]
    return False
