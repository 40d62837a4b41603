"""Tags: the names under which sinks show the statistics of sites. Only this file creates and parses tags."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from lightning_recorder.names import split_call

__all__ = ["Tag", "make_tag", "numbered", "parse_tag", "without_number"]

_WHOLE = "out"
_ROOT = "(root)"
_LOADER = re.compile(r"dataloader_idx_([0-9]+)")
_NUMBER = re.compile(r"^[0-9]+_")


class Tag(NamedTuple):
    """The parts of a tag; see :func:`make_tag`."""

    group: str
    name: str
    path: str
    statistic: str
    loader: int | None = None

    @property
    def module(self) -> str:
        """The module name for titles, with the call number if calls are recorded separately."""
        return (without_number(self.name) or _ROOT) + split_call(self.path)[1]

    @property
    def inner(self) -> str:
        """The path without the call number."""
        return split_call(self.path)[0]


@lru_cache(maxsize=1 << 15)  # the same tags recur in every record
def make_tag(group: str, name: str, path: str, statistic: str = "", loader: int | None = None) -> str:
    """Return the tag of a site's statistic.

    The tag is ``group/name/statistic``, or ``group/name/path/statistic`` for a tensor inside a nested output.

    Args:
        group: ``activations``, ``gradients``, …; TensorBoard groups its page by it.
        name: The module's dotted name; the root, whose name is empty, becomes ``(root)``.
        path: The tensor's path; ``out``, the whole output, is omitted. A number at the end of the path, as in
            ``out#2``, is the call number of the module. It moves to the end of the name.
        statistic: The statistic's name; if empty, the result is the tag of the site.
        loader: The index of the data loader, which comes last, as in ``self.log``.

    Example:
        >>> make_tag("activations", "encoder.conv1", "out", "mean")
        'activations/encoder.conv1/mean'
        >>> make_tag("gradients", "encoder.lstm", "out[1][0]", "rms")
        'gradients/encoder.lstm/out[1][0]/rms'
        >>> make_tag("activations_test", "blocks.0.act", "in[0]#2", "rms", 1)
        'activations_test/blocks.0.act#2/in[0]/rms/dataloader_idx_1'
    """
    inner, call = split_call(path)
    last = "" if loader is None else f"dataloader_idx_{loader}"
    # TensorBoard would show a slash in a name as another level of the hierarchy, so slashes are replaced.
    parts = (group, (name or _ROOT) + call, "" if inner == _WHOLE else inner, statistic, last)
    tag = "/".join(part.replace("/", "_") for part in parts if part)
    # A lone surrogate is a valid attribute name in Python but not valid text in a file.
    return tag.encode("utf-8", "replace").decode("utf-8")


def parse_tag(tag: str) -> Tag | None:
    """Parse a tag of :func:`make_tag`; return None for a tag without a module or a statistic.

    Example:
        >>> parse_tag("activations/blocks.0.act#2/in[0]/rms")
        Tag(group='activations', name='blocks.0.act', path='in[0]#2', statistic='rms', loader=None)
        >>> parse_tag("watch/loss"), parse_tag("recorder/activations/every_n_train_steps")
        (None, None)
    """
    parts = tag.split("/")
    loader = _LOADER.fullmatch(parts[-1])
    parts = parts[:-1] if loader else parts
    if len(parts) < 3 or parts[0] == "recorder":
        return None
    group, named, *paths, statistic = parts
    name, call = split_call(named)
    path = ("/".join(paths) or _WHOLE) + call
    return Tag(group, "" if name == _ROOT else name, path, statistic, int(loader[1]) if loader else None)


def numbered(name: str, number: int, digits: int) -> str:
    """Return a module name with its position in the order of execution as prefix, because TensorBoard sorts tags.

    Example:
        >>> numbered("blocks.2.fc", 17, 3), without_number("017_blocks.2.fc")
        ('017_blocks.2.fc', 'blocks.2.fc')
    """
    return f"{number:0{digits}}_{name}"


def without_number(name: str) -> str:
    """Return the module name in a tag without the prefix with its position."""
    return _NUMBER.sub("", name)
