"""Graphviz in a child process: found, missing, hanging or failing, and its cleanup."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from lightning_recorder import RenderError, fonts
from lightning_recorder.graph import Layout, layout
from lightning_recorder.graph.layout import find_renderer

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the stand-ins for dot are shell scripts")

_HEADER = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, which must be empty after each test."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run."""
    folder = tmp_path / "a run's <folder>"
    folder.mkdir()
    return folder


@pytest.fixture
def document(run: Path) -> Path:
    """A document in the folder of a run."""
    return write(run / "graph.dot", "one", "two")


def write(path: Path, *labels: str) -> Path:
    nodes = " ".join(f'n{index} [label="{label}"]' for index, label in enumerate(labels))
    path.write_text(f'digraph {{ node [fontname="DejaVu Sans"] {nodes} }}', encoding="utf-8")
    return path


@pytest.fixture
def dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that puts a program called dot with the given script on PATH."""

    def install(script: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        program = folder / "dot"
        program.write_text(script, encoding="utf-8")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)

    return install


@pytest.fixture
def no_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the dot of this machine, if there is one."""
    monkeypatch.setenv("PATH", "")


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for(path: Path) -> str:
    """Return the text of a file as soon as it is not empty."""
    while not path.exists() or not path.read_text():
        time.sleep(0.01)
    return path.read_text()


# The Graphviz inside pygraphviz.


def test_pictures_without_dot(no_dot: None, document: Path) -> None:
    """Without dot on PATH the Graphviz inside pygraphviz draws each format, under the name of the document."""
    pictures = Layout(document, ("svg", "png", "pdf")).finish()
    assert pictures == [document.with_suffix(suffix) for suffix in (".svg", ".png", ".pdf")]
    texts = [element.text for element in ET.parse(pictures[0]).iter("{http://www.w3.org/2000/svg}text")]
    assert texts == ["one", "two"]
    assert pictures[1].read_bytes().startswith(_HEADER)
    assert pictures[2].read_bytes().startswith(b"%PDF-")


def test_nothing_is_left_behind(no_dot: None, document: Path, scratch: Path) -> None:
    """After success the folder of the run has document and pictures, and the folder of temporary files is empty."""
    Layout(document, ("svg", "png")).finish()
    assert sorted(path.name for path in document.parent.iterdir()) == ["graph.dot", "graph.png", "graph.svg"]
    assert list(scratch.iterdir()) == []


def test_the_environment_of_the_run_has_no_say(
    no_dot: None, document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child imports neither a module beside the training script nor the user's start-up files."""
    (tmp_path / "pygraphviz.py").write_text("raise SystemExit('the wrong one')")
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit('not asked for')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert [path.name for path in Layout(document, ("svg",)).finish()] == ["graph.svg"]


def test_the_folder_of_pygraphviz_may_have_any_name(
    no_dot: None, document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pygraphviz in a folder whose name ends in dot is not mistaken for the program dot."""
    import pygraphviz

    folder = tmp_path / "packages-for-dot"
    folder.mkdir()
    (folder / "pygraphviz").symlink_to(Path(pygraphviz.__file__).parent)
    monkeypatch.delitem(sys.modules, "pygraphviz")
    monkeypatch.syspath_prepend(str(folder))
    assert [path.name for path in Layout(document, ("svg",)).finish()] == ["graph.svg"]


def test_a_library_that_graphviz_needs_is_missing(
    no_dot: None, document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine without GLib, as in many small images, the error names the library and the way out."""
    missing = "libgobject-2.0.so.0: cannot open shared object file: No such file or directory"
    package = tmp_path / "packages" / "pygraphviz"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"raise ImportError({missing!r})")
    monkeypatch.delitem(sys.modules, "pygraphviz", raising=False)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(layout, "_SCRIPT", [sys.executable, "-S", *layout._SCRIPT[1:]])  # without the real package
    with pytest.raises(RenderError) as raised:
        Layout(document, ("svg",)).finish()
    assert str(raised.value) == (
        f"Graphviz produced no picture, it failed: pygraphviz cannot be loaded ({missing}): install Graphviz, on "
        "Debian and Ubuntu with apt-get install graphviz; its dot is then used"
    )


def test_a_document_that_is_none(no_dot: None, document: Path, scratch: Path) -> None:
    """An unreadable document is an error with the message of Graphviz, and there is no picture."""
    document.write_text("digraph {", encoding="utf-8")
    with pytest.raises(RenderError, match=r"(?s)it failed: .*bad input data"):
        Layout(document, ("svg",)).finish()
    assert [path.name for path in document.parent.iterdir()] == ["graph.dot"]
    assert list(scratch.iterdir()) == []


def pixels(path: Path) -> NDArray[np.uint8]:
    with Image.open(path) as picture:
        return np.asarray(picture.convert("L"))


def test_letters_without_any_font_on_the_machine(
    no_dot: None, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a PNG each letter has its own shape, even if the machine has no fonts."""
    # A configuration without any folder: if the file were missing, the default folders would be searched.
    bare = tmp_path / "fonts.conf"
    bare.write_text('<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd"><fontconfig></fontconfig>')
    monkeypatch.setenv("FONTCONFIG_FILE", str(bare))
    monkeypatch.setenv("FONTCONFIG_PATH", str(tmp_path / "nowhere"))
    drawn = []
    for index, letters in enumerate(("nnnn", "uuuu", "xxxx", "")):
        (path,) = Layout(write(run / f"{index}.dot", letters), ("png",)).finish()
        drawn.append(pixels(path))
    n, u, x, nothing = drawn
    # n and u are equally wide in this font, so only their shapes differ.
    assert n.shape == u.shape
    assert not np.array_equal(n, u)
    assert x.shape != n.shape or not np.array_equal(x, n)
    dark = [int((picture < 128).sum()) for picture in drawn]
    assert min(dark[:3]) > dark[3] + 20
    # A box in place of a letter is symmetric; an n is symmetric neither horizontally nor vertically.
    assert not np.array_equal(n, n[::-1])
    assert nothing.shape[0] <= n.shape[0]


def test_fonts_are_only_read(no_dot: None, document: Path) -> None:
    """Graphviz writes nothing beside the fonts of the package, which are exactly the fonts that it uses."""
    Layout(document, ("png",)).finish()
    assert sorted(path.name for path in fonts.REGULAR.parent.iterdir() if path.suffix != ".py") == [
        "DejaVuSans-Bold.ttf",
        "DejaVuSans.ttf",
        "LICENSE",
        *(["__pycache__"] if (fonts.REGULAR.parent / "__pycache__").exists() else []),
    ]
    assert {fonts.REGULAR, fonts.BOLD} == set(fonts.REGULAR.parent.glob("*.ttf"))


# A dot on PATH.

_REAL_DOT = f"""#!{sys.executable}
import sys
import pygraphviz

formats = [argument[2:] for argument in sys.argv if argument.startswith("-T")]
outputs = [argument[2:] for argument in sys.argv if argument.startswith("-o")]
assert len(formats) == len(outputs) == len(sys.argv[1:-1]) / 2, sys.argv
for format_, output in zip(formats, outputs):
    pygraphviz.AGraph(filename=sys.argv[-1]).draw(output, format=format_, prog="dot")
"""


def test_dot_comes_first(dot: Callable[[str], None], document: Path) -> None:
    """A dot on PATH is used, with a format and an output for each picture and the document as the last argument."""
    dot(_REAL_DOT)
    assert [Path(part).name for part in find_renderer() or []] == ["dot"]
    pictures = Layout(document, ("svg", "png")).finish()
    assert [path.name for path in pictures] == ["graph.svg", "graph.png"]
    assert b"<svg" in pictures[0].read_bytes()
    assert pictures[1].read_bytes().startswith(_HEADER)


def test_no_renderer(no_dot: None, document: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dot and pygraphviz the error says how to install one, and no files remain."""
    monkeypatch.setitem(sys.modules, "pygraphviz", None)
    assert find_renderer() is None
    with pytest.raises(RenderError, match=r"pip install pygraphviz.*or put dot on PATH"):
        Layout(document, ("svg",))
    assert [path.name for path in document.parent.iterdir()] == ["graph.dot"]
    assert list(scratch.iterdir()) == []


def test_a_dot_that_fails(dot: Callable[[str], None], document: Path, scratch: Path) -> None:
    """If the renderer fails, the error has the end of its output, and no picture appears, not even a finished one."""
    dot('#!/bin/sh\necho half > "${2#-o}"\necho "out of ideas" >&2\nexit 3\n')
    with pytest.raises(RenderError, match=r"^Graphviz produced no picture, it failed: out of ideas$"):
        Layout(document, ("svg", "png")).finish()
    assert [path.name for path in document.parent.iterdir()] == ["graph.dot"]
    assert list(scratch.iterdir()) == []


def test_a_dot_that_says_too_much(dot: Callable[[str], None], document: Path) -> None:
    """The end of a long error message of the renderer is kept."""
    dot('#!/bin/sh\nfor i in 1 2 3 4 5 6 7 8 9; do printf "%0200d" 7 >&2; done\necho the end >&2\nexit 1\n')
    with pytest.raises(RenderError, match=r"the end$") as raised:
        Layout(document, ("svg",)).finish()
    assert len(str(raised.value)) < 600


def test_a_dot_that_makes_nothing(dot: Callable[[str], None], document: Path) -> None:
    """A renderer that exits successfully without a picture has failed."""
    dot("#!/bin/sh\nexit 0\n")
    with pytest.raises(RenderError, match=r"^Graphviz produced no picture, it failed$"):
        Layout(document, ("svg",)).finish()


def test_a_dot_that_crashes(dot: Callable[[str], None], document: Path) -> None:
    """The error for a renderer that crashes does not blame the time limit."""
    dot("#!/bin/sh\nkill -SEGV $$\n")
    with pytest.raises(RenderError) as raised:
        Layout(document, ("svg",)).finish()
    assert "at most" not in str(raised.value)


def test_a_dot_that_cannot_be_run(dot: Callable[[str], None], document: Path, scratch: Path) -> None:
    """A dot that cannot be executed is a RenderError, and no files remain."""
    dot("\0 no program")
    with pytest.raises(RenderError):
        Layout(document, ("svg",))
    assert list(scratch.iterdir()) == []


def _hang(pid: Path) -> str:
    return f"#!/bin/sh\necho $$ > '{pid}'\nexec sleep 600\n"


def test_a_dot_that_hangs(dot: Callable[[str], None], document: Path, scratch: Path, tmp_path: Path) -> None:
    """A renderer that takes too long is killed, and the error states its time limit."""
    pid = tmp_path / "pid"
    dot(_hang(pid))
    layout = Layout(document, ("svg",), timeout_s=1.5)
    running = int(wait_for(pid))
    assert is_alive(running)
    with pytest.raises(
        RenderError,
        match=r"^Graphviz produced no picture, it was stopped after 1.5 s; draw a smaller view$",
    ):
        layout.finish()
    assert not is_alive(running)
    assert [path.name for path in document.parent.iterdir()] == ["graph.dot"]
    assert list(scratch.iterdir()) == []


def test_done_ends_what_hangs(dot: Callable[[str], None], document: Path, tmp_path: Path) -> None:
    """``done`` never blocks, and kills a renderer past its deadline."""
    pid = tmp_path / "pid"
    dot(_hang(pid))
    layout = Layout(document, ("svg",), timeout_s=1.0)
    running = int(wait_for(pid))
    answers = [layout.done()]
    while not answers[-1]:
        assert is_alive(running)
        time.sleep(0.05)
        answers.append(layout.done())
    assert answers[0] is False
    assert not is_alive(running)
    with pytest.raises(RenderError, match="it was stopped"):
        layout.finish()


def test_finish_at_once(dot: Callable[[str], None], document: Path, tmp_path: Path) -> None:
    """With ``wait_s=0`` a running renderer is killed at once."""
    pid = tmp_path / "pid"
    dot(_hang(pid))
    layout = Layout(document, ("svg",), timeout_s=600.0)
    running = int(wait_for(pid))
    with pytest.raises(RenderError, match="it was stopped"):
        layout.finish(wait_s=0.0)
    assert not is_alive(running)


def test_pictures_appear_when_they_are_complete(dot: Callable[[str], None], document: Path, tmp_path: Path) -> None:
    """Pictures appear when all of them are complete; an older picture remains until then."""
    ready, go = tmp_path / "ready", tmp_path / "go"
    dot(
        "#!/bin/sh\n"
        'printf "<svg" > "${2#-o}"\n'
        f"echo 1 > '{ready}'\n"
        f"while [ ! -e '{go}' ]; do sleep 0.01; done\n"
        'printf "/>" >> "${2#-o}"\n'
        'printf PNG > "${4#-o}"\n'
    )
    old = document.with_suffix(".svg")
    old.write_text("from the run before")
    layout = Layout(document, ("svg", "png"))
    wait_for(ready)
    assert not layout.done()
    assert old.read_text() == "from the run before"
    assert not document.with_suffix(".png").exists()
    go.touch()
    assert [path.read_text() for path in layout.finish()] == ["<svg/>", "PNG"]
    assert layout.done()


# A process that ends while Graphviz runs.

_DRAWING = """
import sys
from lightning_recorder.graph import Layout
layout = Layout(sys.argv[1], ["svg"], timeout_s=12.5)
print("drawing", flush=True)
layout.finish()
"""


@pytest.fixture
def drawing(
    dot: Callable[[str], None], document: Path, scratch: Path, tmp_path: Path
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a process that draws the document; yield it with the id of its Graphviz process, which never ends."""
    pid = tmp_path / "pid"
    dot(_hang(pid))
    command = [sys.executable, "-c", _DRAWING, str(document)]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "drawing\n"
        graphviz = int(wait_for(pid))
        yield process, graphviz
        process.kill()
    if is_alive(graphviz):
        os.kill(graphviz, signal.SIGKILL)


def test_the_next_layout_removes_what_a_killed_process_left(
    drawing: tuple[subprocess.Popen[str], int], document: Path, scratch: Path, tmp_path: Path
) -> None:
    """A layout removes the files of killed processes but not of running ones; no files remain beside the document."""
    process, _ = drawing
    (left,) = scratch.iterdir()
    (tmp_path / "bin" / "dot").write_text(_REAL_DOT)
    other = write(tmp_path / "other.dot", "one")
    Layout(other, ("svg",)).finish()
    assert list(scratch.iterdir()) == [left]
    process.kill()
    process.wait()
    assert list(scratch.iterdir()) == [left]
    assert [path.name for path in document.parent.iterdir()] == ["graph.dot"]
    Layout(other, ("svg",)).finish()
    assert list(scratch.iterdir()) == []


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(drawing: tuple[subprocess.Popen[str], int], document: Path, scratch: Path) -> None:
    """A process that is interrupted while it waits for a picture kills Graphviz and removes its files."""
    process, graphviz = drawing
    process.send_signal(signal.SIGINT)
    process.wait()
    assert not is_alive(graphviz)
    assert list(scratch.iterdir()) == []
    assert [path.name for path in document.parent.iterdir()] == ["graph.dot"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the limit of another process cannot be set")
def test_graphviz_ends_though_its_parent_was_killed(drawing: tuple[subprocess.Popen[str], int]) -> None:
    """The limit on processor time ends Graphviz if its parent was killed."""
    import resource

    process, graphviz = drawing
    process.kill()
    process.wait()
    assert is_alive(graphviz)
    assert resource.prlimit(graphviz, resource.RLIMIT_CPU) == (13, 13)


def test_a_layout_that_nobody_finishes_leaves_nothing(
    dot: Callable[[str], None], document: Path, scratch: Path, tmp_path: Path
) -> None:
    """A layout that is discarded kills Graphviz and removes its files."""
    pid = tmp_path / "pid"
    dot(_hang(pid))
    layout = Layout(document, ("svg",))
    running = int(wait_for(pid))
    del layout
    assert not is_alive(running)
    assert list(scratch.iterdir()) == []
