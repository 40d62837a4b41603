"""A map from the module names of one run to the module names of another, given as rules or found from the graphs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from difflib import SequenceMatcher

from lightning_recorder.errors import ArgumentError
from lightning_recorder.graph.model import Graph, Node
from lightning_recorder.names import Site

__all__ = ["NameMap", "suggest_rules"]


class NameMap:
    """Maps names of the first run to names of the second run by rules.

    Args:
        rules: Rules such as ``"model.layers.*=blocks.*"``. Each ``*`` matches any text, which replaces the ``*`` at the
            same position on the right side. The first rule that matches a whole name applies. Other names do not
            change.

    Raises:
        ArgumentError: If a rule has no ``=``, or if the two sides of a rule have different numbers of ``*``.

    Example:
        >>> names = NameMap(["stem=embed", "layers.*.attn.*=blocks.*.attention.*"])
        >>> names("layers.3.attn.q"), names("stem"), names("head")
        ('blocks.3.attention.q', 'embed', 'head')
    """

    def __init__(self, rules: Iterable[str] = ()) -> None:
        self.rules = tuple(rules)
        """The rules."""
        self._patterns: list[tuple[re.Pattern[str], list[str]]] = []
        for rule in self.rules:
            left, equals, right = rule.partition("=")
            if not equals or left.count("*") != right.count("*"):
                raise ArgumentError(
                    f"a rule of --map is NAME_IN_A=NAME_IN_B with as many * on both sides, such as "
                    f"'model.layers.*=blocks.*'; got {rule!r}"
                )
            pattern = "(.*)".join(map(re.escape, left.strip().split("*")))
            self._patterns.append((re.compile(pattern, re.DOTALL), right.strip().split("*")))

    def __call__(self, name: str) -> str:
        """Return the name in the second run."""
        for pattern, parts in self._patterns:
            match = pattern.fullmatch(name)
            if match is not None:
                return parts[0] + "".join(text + part for text, part in zip(match.groups(), parts[1:], strict=True))
        return name

    def unused(self, names: Iterable[str]) -> list[str]:
        """Return the rules that match none of the names."""
        known = list(names)
        pairs = zip(self.rules, self._patterns, strict=True)
        return [rule for rule, (pattern, _) in pairs if not any(map(pattern.fullmatch, known))]

    def sites(self, sites: Iterable[Site], others: Iterable[Site]) -> dict[Site, Site]:
        """Return the site of the second run for each site that both runs have.

        Raises:
            ArgumentError: If two sites have the same counterpart.
        """
        there = set(others)
        found = {site: Site(self(site.name), site.path) for site in sites}
        found = {site: counterpart for site, counterpart in found.items() if counterpart in there}
        twice = [site for site, count in Counter(found.values()).items() if count > 1]
        if twice:
            names = [site.name for site, counterpart in found.items() if counterpart == twice[0]]
            raise ArgumentError(f"--map gives {' and '.join(map(repr, names))} the same name {twice[0].name!r}")
        return found


def suggest_rules(one: Graph, other: Graph) -> list[str]:
    """Find rules from the structure for modules whose names are in only one of the graphs; may be empty.

    Module calls are matched in the order of execution by class, settings and output shapes.
    """
    names = [{node.name for node in graph.module_calls()} for graph in (one, other)]
    mine, theirs = (
        [node for node in graph.module_calls() if node.call == 1 and node.name not in known]
        for graph, known in ((one, names[1]), (other, names[0]))
    )
    keys, other_keys = ([_key(node) for node in nodes] for nodes in (mine, theirs))
    rules: dict[str, None] = {}
    for start, begin, size in SequenceMatcher(None, keys, other_keys, autojunk=False).get_matching_blocks():
        for node, counterpart in zip(mine[start : start + size], theirs[begin : begin + size], strict=True):
            rules[_rule(node.name, counterpart.name)] = None
    return _checked(list(rules), [node.name for node in mine], {node.name for node in theirs})


def _key(node: Node) -> tuple[object, ...]:
    return node.type_name, node.arguments, tuple(meta.shape for meta in node.outputs)


def _rule(name: str, other: str) -> str:
    """Return the most general rule: equal trailing components become one ``*``; equal numbers become one ``*`` each."""
    mine, theirs = name.split("."), other.split(".")
    ends = 0
    while ends < min(len(mine), len(theirs)) - 1 and mine[-1 - ends] == theirs[-1 - ends]:
        ends += 1
    if ends:
        mine, theirs = [*mine[:-ends], "*"], [*theirs[:-ends], "*"]
    numbers = [part for part in mine if part.isdigit()]
    if numbers and numbers == [part for part in theirs if part.isdigit()]:
        mine, theirs = ([("*" if part.isdigit() else part) for part in parts] for parts in (mine, theirs))
    return f"{'.'.join(mine)}={'.'.join(theirs)}"


def _checked(rules: list[str], names: list[str], others: set[str]) -> list[str]:
    """Return the rules that map at least one name, the most specific first; empty if two names would collide."""
    rules.sort(key=lambda rule: (-rule.partition("=")[0].count("."), rule.count("*")))
    names_map = NameMap(rules)
    found = [names_map(name) for name in names]
    hits = [name for name in found if name in others]
    return rules if hits and len(set(hits)) == len(hits) else []
