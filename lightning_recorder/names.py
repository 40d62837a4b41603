"""Module names, with glob matching and suggestions for wrong names, and the sites of tensors."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

__all__ = [
    "RUNNING_STATISTICS",
    "Site",
    "closest_names",
    "compile_glob",
    "corrected_glob",
    "is_batch",
    "is_input",
    "site_title",
    "split_call",
]

RUNNING_STATISTICS = ("running_mean", "running_var")
"""The paths of the running statistics of a normalization layer, which are recorded like its parameters."""


class Site(NamedTuple):
    """The place where a tensor was recorded: a module, and the path of the tensor in its inputs or outputs."""

    name: str
    """The name of the module."""
    path: str
    """The path of the tensor in the module: ``out`` for the output, ``out.logits`` for a tensor in the output,
    ``in[0]`` for the first positional argument, ``in.mask`` for the keyword argument ``mask``; for a parameter, its
    name in the module, such as ``weight``. If the calls of a module are kept apart, the paths of its second call end
    with ``#2``."""


def compile_glob(pattern: str) -> re.Pattern[str]:
    """Compile a glob to a regular expression.

    Example:
        >>> [bool(compile_glob(glob).fullmatch("a.b.c")) for glob in ("**.c", "a.*", "a.**", "a.*.c", "a.**.b.c", "*")]
        [True, False, True, True, True, False]
    """
    expression = ""
    segments: list[str] = []
    for segment in pattern.split("."):
        # Adjacent ** segments are equivalent to one.
        if segment != "**" or segments[-1:] != ["**"]:
            segments.append(segment)
    for position, segment in enumerate(segments):
        last = position == len(segments) - 1
        if segment != "**":
            expression += "".join({"*": "[^.]*", "?": "[^.]"}.get(char, re.escape(char)) for char in segment)
            expression += "" if last else r"\."
        elif last and position:
            # ``a.**`` also matches ``a``, so the dot is part of the optional group.
            expression = expression.removesuffix(r"\.") + r"(?:\.[^.]+)*"
        else:
            expression += r"(?:[^.]+\.)*" + ("[^.]+" if last else "")
    return re.compile(expression)


_CLOSE = 0.6  # the minimum difflib ratio of similar names


def closest_names(pattern: str, names: Iterable[str]) -> str:
    """Return the end of a message about an unknown name or glob, with at most three close names.

    Example:
        >>> closest_names("encoder.conv", ["", "encoder", "encoder.conv1", "head"])
        "the closest names are 'encoder.conv1', 'encoder'"
        >>> closest_names("nosuch", ["stem", "head"])
        "no name is similar; the names are 'stem', 'head'"
        >>> closest_names("blocks.*.attn", ["", "stem", "block", "block.0", "block.0.attn"])
        "did you mean 'block.*.attn'? The closest names are 'block.0.attn', 'block.0'"
    """
    known = [name for name in names if name]
    if not known:
        return "the model has no submodules"
    # Most mistakes affect one segment, so names with a similar last segment or the same first segment come before names
    # that are merely similar as a whole.
    near = difflib.get_close_matches(pattern, known, n=3, cutoff=_CLOSE)
    head, tail = pattern.partition(".")[0], pattern.rpartition(".")[2]
    tails = difflib.get_close_matches(tail, {name.rpartition(".")[2] for name in known}, n=3, cutoff=0.7)
    alike = [name for each in tails for name in known if name.rpartition(".")[2] == each]
    related = [name for name in known if name.partition(".")[0] == head]
    closest = list(dict.fromkeys([*alike, *near, *related] if "*" in pattern else [*near, *alike, *related]))[:3]
    glob = corrected_glob(pattern, known)
    hint = f"did you mean {glob!r}?" if glob else ""
    if not closest:
        names = ", ".join(map(repr, known[:3])) + (", …" if len(known) > 3 else "")
        return hint or f"no name is similar; the names are {names}"
    noun = "name is" if len(closest) == 1 else "names are"
    listed = f"he closest {noun} {', '.join(map(repr, closest))}"
    return f"{hint} T{listed}" if glob else f"t{listed}"


def corrected_glob(pattern: str, names: Iterable[str]) -> str:
    """Correct a glob that matches nothing. Return an empty string for a plain name or without a likely correction.

    Only segments that do not exist are replaced, each by the closest segment at its position. If that is not enough, a
    prefix is added or the first segment is removed.

    Example:
        >>> names = ["encoder", "encoder.layers", "encoder.layers.0", "encoder.layers.0.attn"]
        >>> wrong = ["encoder.layer.*.atn", "layers.*.attn", "model.encoder.**", "x.*"]
        >>> [corrected_glob(each, names) for each in wrong]
        ['encoder.layers.*.attn', '**.layers.*.attn', 'encoder.**', '']
    """
    if not {"*", "?"}.intersection(pattern):
        return ""
    known = list(names)
    plain = re.sub(r"\[(\w+|\*)\]", r".\1", pattern.replace("/", "."))  # accepts paths and indices as written in code
    # Candidates are tried in order of their similarity to the original.
    found = plain if _matches(plain, known) else ""
    found = found or _with_closest_parts(plain, known)
    if not found and _matches(f"**.{plain}", known):
        found = f"**.{plain}"
    tail = plain.partition(".")[2]
    if not found and tail.strip("*.?"):
        found = tail if _matches(tail, known) else _with_closest_parts(tail, known)
    return found


def _matches(pattern: str, names: Iterable[str]) -> bool:
    return any(map(compile_glob(pattern).fullmatch, names))


def _with_closest_parts(pattern: str, names: Iterable[str]) -> str:
    """Replace each segment that does not exist by the closest segment. Return an empty string if none is close."""
    children: dict[str, dict[str, str]] = {}  # by module name, "" for the root
    for name in names:
        parts = name.split(".")
        for depth, part in enumerate(parts):
            children.setdefault(".".join(parts[:depth]), {})[part] = ".".join(parts[: depth + 1])
    # Each corrected prefix of the glob, with its distance from the original and the modules that it matches.
    ways: dict[str, tuple[float, set[str]]] = {"": (0.0, {""})}
    for part in pattern.split("."):
        further: dict[str, tuple[float, set[str]]] = {}
        for way, (distance, places) in ways.items():
            for meant, apart, reached in _steps(part, places, children):
                further[f"{way}.{meant}" if way else meant] = distance + apart, reached
        ways = further
    reaching = {way: distance for way, (distance, _) in ways.items() if _matches(way, names)}
    return min(reaching, key=lambda way: (reaching[way], way)) if reaching else ""


def _steps(part: str, places: set[str], children: dict[str, dict[str, str]]) -> Iterator[tuple[str, float, set[str]]]:
    """Yield possible corrections of a glob segment, each with its distance and the modules that it matches."""
    below = [(child, name) for place in places for child, name in children.get(place, {}).items()]
    if part == "**":
        reached, new = set(places), set(places)
        while new:
            new = {name for place in new for name in children.get(place, {}).values()}
            reached |= new
        yield part, 0.0, reached
        return
    fits = compile_glob(part).fullmatch
    exact = {name for child, name in below if fits(child)}
    if exact:
        yield part, 0.0, exact
        return
    there = {child: child.lower() for child, _ in below}
    for near in difflib.get_close_matches(part.lower(), set(there.values()), n=3, cutoff=0.6):
        apart = 1.0 + (1.0 - difflib.SequenceMatcher(None, part.lower(), near).ratio())
        for meant in sorted(child for child, lower in there.items() if lower == near):
            yield meant, apart, {name for child, name in below if child == meant}


def split_call(path: str) -> tuple[str, str]:
    """Split a tensor path into the path itself and the suffix with the call number.

    Example:
        >>> split_call("out[0]#2"), split_call("out")
        (('out[0]', '#2'), ('out', ''))
    """
    inner, mark, number = path.rpartition("#")
    return (inner, mark + number) if mark and number.isdecimal() else (path, "")


def is_input(path: str) -> bool:
    """Return True for the path of an input of a module, such as ``in[0]`` or ``in.mask``."""
    return path == "in" or path.startswith(("in[", "in."))


def is_batch(name: str, path: str) -> bool:
    """Return True for the site of a tensor in the batch, which belongs to no module.

    Example:
        >>> [is_batch("", path) for path in ("batch", "batch[0]", "batch.image", "batches", "out")]
        [True, True, True, False, False]
    """
    return not name and path[:5] == "batch" and path[5:6] in ("", ".", "[")


def site_title(name: str, path: str) -> str:
    """Return the title of a site in pictures and messages.

    Example:
        >>> site_title("head", "out"), site_title("head", "in.mask"), site_title("act", "out#2"), site_title("", "out")
        ('head', 'head in.mask', 'act#2', '(root)')
        >>> site_title("", "batch.image")
        'batch.image'
    """
    if is_batch(name, path):
        return path
    inner, call = split_call(path)
    return (name or "(root)") + call + ("" if inner == "out" else f" {inner}")
