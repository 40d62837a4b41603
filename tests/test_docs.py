"""The README and the pages of docs: code that runs, links that lead somewhere, names that exist."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import lightning_recorder
from lightning_recorder import RecorderWarning
from lightning_recorder.sinks import loggers
from tests.callbacks.models import Classifier, digits
from tests.commands.console import run
from tests.test_public_api import SUBPACKAGES

ROOT = Path(lightning_recorder.__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {path.relative_to(ROOT).as_posix(): path for path in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]}


CASES = {page: path.read_text(encoding="utf-8") for page, path in PAGES.items() if page.startswith("docs/cases/")}


def masked(answer: str) -> str:
    """Return the words of an answer, without its numbers, bars, and the places of breaks and of code."""
    plain = re.sub(r"[\w./-]+\.(py|md):\d+", "CODE", answer)
    return " ".join(re.sub(r"-?\d[\d.,e+-]*|[▁-█]+", "#", plain).split())


def blocks(path: Path) -> list[tuple[int, str]]:
    """Return the Python blocks of a page that are not doctests, each with the number of lines before it."""
    text = path.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [(text[: each.start(1)].count("\n"), each[1]) for each in found if not each[1].startswith(">>>")]


def run_on_two_ranks(program: str) -> None:
    """Run a program in the current folder, on two ranks."""
    Path("train.py").write_text(program, encoding="utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(launcher, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "RecorderWarning" not in done.stderr


# The first page of the site has the code of the README.
@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("page", [page for page, path in PAGES.items() if blocks(path) and page != "docs/index.md"])
def test_the_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given the reader's model and loader, the blocks of a page run in order, in an empty folder, without a warning.

    Those of a page that calls ``torchrun`` are one program, which two processes run.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loggers, "_SINKS", dict(loggers._SINKS))  # a page may register a sink
    namespace: dict[str, Any] = {"__name__": "reader", "model": Classifier(), "loader": digits(50, 2)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Lightning says about few workers and missing arguments
        warnings.filterwarnings("error", category=RecorderWarning)
        if "$ torchrun --nproc-per-node 2 train.py" in PAGES[page].read_text(encoding="utf-8"):
            run_on_two_ranks("\n".join(block for _, block in blocks(PAGES[page])))
        else:
            for line, block in blocks(PAGES[page]):
                exec(compile("\n" * line + block, page, "exec"), namespace)
    for path, answer in re.findall(
        r"^\$ lightning-recorder doctor (\S+)\n(.*?)^```", CASES.get(page, ""), re.MULTILINE | re.DOTALL
    ):
        assert masked(run("doctor", path).out).startswith(masked(answer))


def test_the_first_page_has_the_code_of_the_readme() -> None:
    """The Python blocks of the README and of the first page of the site are equal."""
    readme, index = ([block for _, block in blocks(PAGES[page])] for page in ("README.md", "docs/index.md"))
    assert readme == index
    assert readme


def without_code(text: str) -> str:
    """Return a page without its blocks of code and its comments."""
    return re.sub(r"^(```|~~~).*?^\1$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", without_code(path.read_text(encoding="utf-8")), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", each).lower()) for each in headings)
    return {each.strip().replace(" ", "-") for each in plain}


def links(page: str) -> list[str]:
    """Return the targets of the links and pictures of a page that are not addresses in the web."""
    text = re.sub(r"`[^`\n]*`", "", without_code(PAGES[page].read_text(encoding="utf-8")))
    return [each for each in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:", each)]


@pytest.mark.parametrize("page", PAGES)
def test_each_link_of_a_page_leads_somewhere(page: str) -> None:
    """Each relative link leads to a file or folder of the repository, and each anchor to a heading in it."""
    for link in links(page):
        target, _, anchor = link.partition("#")
        path = PAGES[page].parent / target if target else PAGES[page]
        assert path.exists(), link
        assert not anchor or anchor in anchors(path), link


def test_the_page_for_assistants() -> None:
    """Each link of ``llms.txt`` leads to a page, and each page of the reference for scripts is named once."""
    text = (DOCS / "llms.txt").read_text(encoding="utf-8")
    assert re.match(r"# lightning_recorder\n\n> .+\n", text)
    found = re.findall(r"\]\(([^)]+)\)", text)
    assert [link for link in found if f"docs/{link}" not in PAGES] == []
    assert len(set(found)) == len(found)
    assert "reference/scripts.md" in found


def test_the_links_are_found() -> None:
    """The search for links finds pages, anchors and pictures."""
    found = {link for page in PAGES for link in links(page)}
    assert {"../pictures/stuck-loss-page.png", "how-to/large-models.md", "../troubleshooting.md#too-many-tags"} <= found


@functools.cache
def public_names() -> dict[str, Any]:
    """Return the public classes and functions by name."""
    errors = "lightning_recorder.errors"
    modules = [lightning_recorder, *(importlib.import_module(f"lightning_recorder.{name}") for name in SUBPACKAGES)]
    modules += [
        importlib.import_module(f"lightning_recorder.{name}") for name in ("huggingface", "insight", "loops", "testing")
    ]
    found = {name: getattr(module, name) for module in modules for name in getattr(module, "__all__", ())}
    # The functions of `errors` check arguments for the other modules.
    functions = {name for name, value in found.items() if inspect.isfunction(value) and value.__module__ != errors}
    return {name: value for name, value in found.items() if inspect.isclass(value) or name in functions}


def calls(page: str) -> Iterator[ast.Call]:
    """Yield the calls in the inline code of a page whose function is a plain name."""
    text = without_code(PAGES[page].read_text(encoding="utf-8"))
    for code in re.findall(r"`([^`\n]+\(.*?\))`", text):
        try:
            tree = ast.parse(code.replace("…", "..."))
        except SyntaxError:
            continue
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))


@pytest.mark.parametrize("page", [page for page in PAGES if "migration" not in page])
def test_the_arguments_in_the_text_of_a_page_exist(page: str) -> None:
    """Each keyword of a call of a public name in inline code, such as `Outputs(plots=False)`, is an argument of it."""
    for call in calls(page):
        function = public_names().get(call.func.id)  # type: ignore[attr-defined]  # a plain name
        if function is not None and (named := {each.arg for each in call.keywords if each.arg}):
            assert named <= set(inspect.signature(function).parameters), ast.unparse(call)


def test_the_calls_in_the_text_are_found() -> None:
    """The search for calls finds public names with arguments."""
    found = {ast.unparse(call) for page in PAGES for call in calls(page)}
    assert {"Outputs(max_tags=50)", "Schedule(max_overhead=0.02)", "StepWatch(wait=True)"} <= found


def test_the_reference_has_every_public_name_once() -> None:
    """Each public class and function has exactly one entry in the reference."""
    entries: list[str] = []
    for page in (DOCS / "reference").glob("*.md"):
        entries += re.findall(r"^\.\. auto(?:class|function):: (\w+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(entries) == sorted(public_names())


def generator() -> ModuleType:
    """Return docs/generate.py as a module."""
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_from_the_code_are_current() -> None:
    """The settings, commands and rules are those of the code; if not, run `python docs/generate.py`."""
    for page, make in generator().PAGES.items():
        written, made = ((DOCS / page).read_text(encoding="utf-8"), make())
        # Versions of Python wrap the usage of a command differently.
        written, made = (re.sub(r"usage:.*?\n\n", "", text, flags=re.DOTALL).split() for text in (written, made))
        assert written == made, page


def test_the_readme_is_short_and_shows_a_picture_first() -> None:
    """The README has at most 150 lines, and a sick run, its answer and its picture before any other section."""
    text = PAGES["README.md"].read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    first = text.partition("\n## ")[0]
    assert len(first.splitlines()) <= 35
    assert "\nwarning: net.6 returns only zeros" in first
    assert re.search(r"!\[.+\]\(docs/pictures/stuck-loss-page\.png\)", first)


def test_the_glossary_defines_the_words_of_the_package() -> None:
    """The glossary has the words that the documentation uses in a sense of its own, in alphabetical order."""
    words = re.findall(r"^(\w[\w ]*)\n: ", (DOCS / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert words == sorted(words)
    assert {"record", "site", "receipt", "tap", "dump", "sink", "finding"} <= set(words)
