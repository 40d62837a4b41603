"""Differences between the graphs and the settings of two runs, as opposed to their values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from lightning_recorder.graph.diff import GraphDiff, NodeChange, diff
from lightning_recorder.graph.model import Graph
from lightning_recorder.privacy import hide_secrets
from lightning_recorder.recordings.name_map import NameMap
from lightning_recorder.recordings.recording import Run

__all__ = ["Change", "Phase", "distinct", "graph_changes", "series_changes", "setting_changes", "settings_of"]


class Phase(IntEnum):
    """The phases of a training, in the order of time."""

    START = 0
    """The initial values of the parameters."""
    FORWARD = 1
    BACKWARD = 2
    GRADIENT = 3
    """The gradients after clipping, as the optimizer uses them."""
    UPDATE = 4


_ALL = tuple(Phase)
_FIRST = (Phase.START, Phase.FORWARD)


@dataclass(frozen=True)
class Change:
    """A difference of the model or of a setting.

    Args:
        what: The setting, or the name of the module, function or tensor.
        one: The value in the first run; empty if the setting or module does not exist there.
        other: The value in the second run.
        phases: The phases of a training in which the difference can have its first effect.
        others: The names of further modules with the same difference.
        is_graph: True for a difference of the model.
        aspect: The setting of a module or the argument of a function; empty for its class.
        since: The first recorded step at which a setting differs; ``None`` if it differs from the beginning.
    """

    what: str
    one: str
    other: str
    phases: tuple[Phase, ...] = _ALL
    others: tuple[str, ...] = ()
    is_graph: bool = False
    aspect: str = ""
    since: int | None = None

    def __str__(self) -> str:
        if not self.is_graph:
            since = "" if self.since is None else f" from step {self.since}"
            return f"{self.what} {self.one} → {self.other}{since}"
        more = f" and {len(self.others)} more" if self.others else ""
        if not (self.one and self.other):
            return f"`{self.what}`{more} only in {'A' if self.one else 'B'}"
        return f"`{self.what}`{more}: {self.aspect + ' ' * bool(self.aspect)}{self.one} → {self.other}"


# Settings.

_OF_TRAINER = {
    "precision": _FIRST,
    "accumulate_grad_batches": (Phase.FORWARD, Phase.BACKWARD, Phase.GRADIENT),
    # Lightning clips gradients after the hook that records them, right before the optimizer uses them.
    "gradient_clip_val": (Phase.GRADIENT, Phase.UPDATE),
    "gradient_clip_algorithm": (Phase.GRADIENT, Phase.UPDATE),
}
_OF_DATA = {"batch_size": "batch size", "sampler": "sampler", "dataset": "dataset", "samples": "number of samples"}


def setting_changes(one: Run, other: Run) -> list[Change]:
    """Return the settings that differ between two runs, as far as both have recorded them."""
    counts = [_group_counts(run) for run in (one, other)]
    mine, theirs = (dict(_settings(run, is_split=counts[0] == counts[1])) for run in (one, other))
    return [
        *(
            Change(key[0], _shown(mine[key]), _shown(theirs[key]), key[1])
            for key in mine
            if key in theirs and mine[key] != theirs[key]
        ),
        *_later_changes(one, other),
    ]


def settings_of(run: Run) -> dict[str, str]:
    """Return the settings of a run by name. A setting that differs between parameter groups has all values."""
    return {name: _shown(value) for (name, _), value in _settings(run, is_split=False)}


def _later_changes(one: Run, other: Run) -> list[Change]:
    """Return the optimizer settings that differ, at the first common recorded step with a difference."""
    for label in one:
        there = set(other[label].steps) if label in other else set()
        steps = [step for step in one[label].steps if step in there]
        for place, step in enumerate(steps):
            groups = [run[label].about(step).get("groups") for run in (one, other)]
            is_split = len({len(each) for each in groups if isinstance(each, list)}) < 2
            mine, theirs = (dict(_of_groups(each, is_split=is_split)) for each in groups)
            found = [
                Change(key[0], _shown(mine[key]), _shown(theirs[key]), key[1], since=step if place else None)
                for key in mine
                if key in theirs and mine[key] != theirs[key]
            ]
            if found:
                return found
    return []


def _settings(run: Run, *, is_split: bool) -> Iterator[tuple[tuple[str, tuple[Phase, ...]], Any]]:
    """Yield each setting as its name, the phases that it affects, and its value.

    If ``is_split``, each parameter group of an optimizer has separate settings; otherwise a setting has the values of
    all groups.
    """
    found = _first_settings(run)
    trainer, data, seeds = (_mapping(found.get(name)) for name in ("trainer", "data", "seeds"))
    for name, value in seeds.items():
        yield ("seed" if name == "seed_everything" else f"{name} seed", _FIRST), value
    for name, value in trainer.items():
        yield (name, _OF_TRAINER.get(name, _ALL)), value
    for name, value in data.items():
        yield (_OF_DATA.get(name, name), (Phase.FORWARD,)), value
    yield from _of_optimizers(_optimizers(found), is_split=is_split)
    for name, value in _mapping(found.get("hparams")).items():
        yield (f"hparams.{name}", _ALL), value


def _first_settings(run: Run) -> Mapping[str, Any]:
    return next((each for label in run for each in _recorded(run, label)), {})


def _optimizers(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = settings.get("optimizers")
    return [_mapping(each) for each in found] if isinstance(found, list) else []


def _group_counts(run: Run) -> list[int]:
    """Return the number of parameter groups of each optimizer."""
    groups = [each.get("groups") for each in _optimizers(_first_settings(run))]
    return [len(each) if isinstance(each, list) else 0 for each in groups]


def _recorded(run: Run, label: str) -> Iterator[Mapping[str, Any]]:
    for session in run[label].sessions:
        settings = session.about.get("settings")
        if isinstance(settings, dict):
            yield hide_secrets(settings)  # files of version 0.1 contain secrets


def _of_groups(groups: object, *, is_split: bool) -> Iterator[tuple[tuple[str, tuple[Phase, ...]], Any]]:
    """Yield the settings of parameter groups: separately for each group, or the different values of all groups."""
    groups = [_mapping(each) for each in groups] if isinstance(groups, list) else []
    names = dict.fromkeys(name for group in groups for name in group if name not in _OF_SCHEDULERS)
    if not is_split:
        for name in names:
            values = [group[name] for group in groups if name in group]
            # Sorted, since the order of the groups does not matter.
            different = tuple(
                sorted((each for place, each in enumerate(values) if each not in values[:place]), key=_shown)
            )
            yield (name, (Phase.UPDATE,)), different if len(different) > 1 else different[0]
        yield ("parameter groups", (Phase.UPDATE,)), len(groups)
        return
    for number, group in enumerate(groups):
        of = f" of group {number}" if len(groups) > 1 else ""
        for name in names:
            if name in group:
                yield (f"{name}{of}", (Phase.UPDATE,)), group[name]


_OF_SCHEDULERS = ("initial_lr", "swa_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")


def _of_optimizers(
    optimizers: list[Mapping[str, Any]], *, is_split: bool
) -> Iterator[tuple[tuple[str, tuple[Phase, ...]], Any]]:
    for place, optimizer in enumerate(optimizers):
        of = f" of optimizer {place}" if len(optimizers) > 1 else ""
        yield (f"optimizer{of}", (Phase.UPDATE,)), optimizer.get("class")
        for (name, phases), value in _of_groups(optimizer.get("groups"), is_split=is_split):
            yield (f"{name}{of}", phases), value


def distinct(changes: list[Change]) -> list[Change]:
    """Return each difference once, since settings of groups, seeds and hyperparameters often repeat other settings."""
    found: dict[tuple[str, str, str], Change] = {}
    for change in changes:
        if change.is_graph:
            found[change.what, change.aspect, change.one] = change
            continue
        name = change.what.partition(" of ")[0].removeprefix("hparams.")
        found.setdefault(("seed" if name.endswith("seed") else name, change.one, change.other), change)
    classes = [each for each in found.values() if each.what.startswith("optimizer")]
    # If the optimizer class differs, its settings differ as a consequence, so they are left out.
    found_classes = [each for each in found.values() if each in classes or each.phases != (Phase.UPDATE,)]
    return found_classes if classes else list(found.values())


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"({', '.join(map(_shown, value))})"
    if isinstance(value, tuple):  # the values of several parameter groups
        return " and ".join(map(_shown, value))
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


# Series.


def series_changes(one: Run, other: Run, names: NameMap) -> list[Change]:
    """Return the modules that are trained, or in training mode, in only one of the runs."""
    return _merged([*_trained(one, other, names), *_modes(one, other, names)])


def _trained(one: Run, other: Run, names: NameMap) -> Iterator[Change]:
    values = [dict(_parameters(run)) for run in (one, other)]
    mine = {names(name): paths for name, paths in values[0].items()}
    graphs = one.graph, other.graph
    if not values[0] or not values[1] or graphs[0] is None or graphs[1] is None:
        return
    called = [{names(node.name) for node in graphs[0].nodes}, {node.name for node in graphs[1].nodes}]
    for name in dict.fromkeys([*mine, *values[1]]):
        here, there = mine.get(name, ()), values[1].get(name, ())
        if here == there or name not in called[0] & called[1]:
            continue  # a module that only one model has is reported separately
        if not here or not there:
            state = ["trained" if paths else "not trained" for paths in (here, there)]
            yield Change(name or "(root)", state[0], state[1], is_graph=True)


def _parameters(run: Run) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the modules with the names of their recorded parameters."""
    found: dict[str, list[str]] = {}
    for label in run:
        if any(each.about.get("group") == "parameters" for each in run[label].sessions):
            for site in run[label].sites:
                if site.path.endswith(".grad"):
                    found.setdefault(site.name, []).append(site.path)
    yield from ((name, tuple(sorted(paths))) for name, paths in found.items())


def _modes(one: Run, other: Run, names: NameMap) -> Iterator[Change]:
    modes = [dict(_in_eval(run)) for run in (one, other)]
    mine = {names(name): is_eval for name, is_eval in modes[0].items()}
    for name, here in mine.items():
        there = modes[1].get(name, here)
        if here != there:
            state = ["eval mode" if is_eval else "training mode" for is_eval in (here, there)]
            yield Change(name or "(root)", state[0], state[1], _ALL[:3], is_graph=True)


def _in_eval(run: Run) -> Iterator[tuple[str, bool]]:
    for label in run:
        series = run[label]
        if series.stage == "train" and series.steps and not any(site.path.count(".") for site in series.sites):
            modes = series.numbers("eval_mode")[0].tolist() if "eval_mode" in series.statistics else [0.0] * len(series)
            yield from ((site.name, mode == 1.0) for site, mode in zip(series.sites, modes, strict=True))


# Graphs.

_DERIVED = ("outputs", "dtypes", "parameters", "tied", "autograd", "repeats", "parallel", "inside", "takes")


def graph_changes(one: Run, other: Run, names: NameMap) -> list[Change]:
    """Return the differences between the models' graphs, in the order of execution and without consequences.

    If a module is only in one graph, the modules and functions inside of it are not reported. If a module has changed,
    the functions that it calls are not reported. Shapes, dtypes and edges are reported only if nothing else differs.
    """
    graphs = one.graph, other.graph
    if graphs[0] is None or graphs[1] is None:
        return []
    mine = replace(
        graphs[0],
        nodes=tuple(
            replace(node, name=_renamed(node.name, names) if node.kind in ("parameter", "buffer") else names(node.name))
            if node.kind in ("module", "parameter", "buffer")
            else node
            for node in graphs[0].nodes
        ),
    )
    return _Graphs(mine, graphs[1]).changes()


def _renamed(name: str, names: NameMap) -> str:
    owner, dot, own = name.rpartition(".")
    return f"{names(owner)}{dot}{own}"


class _Graphs:
    """Two graphs and their differences."""

    def __init__(self, one: Graph, other: Graph) -> None:
        self.found: GraphDiff = diff(one, other)
        nodes = [*one.nodes, *other.nodes]
        self.modules = {node.name for node in nodes if node.kind == "module"}
        self.optimizers = {node.name for node in nodes if node.kind == "optimizer"}
        self.tensors = {node.name for node in nodes if node.kind in ("parameter", "buffer", "tensor")}
        self.inputs = {node.name for node in nodes if node.kind == "input"}
        self.batch_sizes = [_batch_size(graph) for graph in (one, other)]
        self.batches = [{node.name: node for node in graph.nodes if node.kind == "input"} for graph in (one, other)]

    def changes(self) -> list[Change]:
        """Return the differences that are not consequences of others. Equal differences are merged."""
        found = [*self._modules()]
        known = {change.what for change in found}
        found += [change for change in self._functions() if not _is_inside(_owner(change.what), known)]
        found += [*self._optimizers()]
        return _merged(found or [*self._edges()])

    def _modules(self) -> Iterator[Change]:
        for names, is_one in ((self.found.removed, True), (self.found.added, False)):
            gone = [name for name in names if _module(name) in self.modules and "/" not in name]
            for name in gone:
                if not _is_inside(name.rpartition(".")[0], set(gone)):
                    yield Change(name, "there" * is_one, "there" * (not is_one), _ALL, is_graph=True)
        for change in self.found.changed:
            if _module(change.name) in self.modules and "/" not in change.name:
                yield from self._of_module(change)

    def _of_module(self, change: NodeChange) -> Iterator[Change]:
        aspects = _aspects(change)
        name = _module(change.name)
        if "class" in aspects:
            yield Change(name, *aspects["class"], _ALL[:3], is_graph=True)
            return
        given = {key: pair for key, pair in aspects.items() if key not in _DERIVED}
        for key, pair in given.items():
            yield Change(name, *pair, _ALL[:3], is_graph=True, aspect=key)

    def _functions(self) -> Iterator[Change]:
        skipped = self.modules | self.optimizers | self.tensors | self.inputs | {"output", "backward", "the model"}
        for names, is_one in ((self.found.removed, True), (self.found.added, False)):
            for name in names:
                if name not in skipped and _module(name) not in self.modules:
                    yield Change(name, "there" * is_one, "there" * (not is_one), _ALL[1:3], is_graph=True)
        for change in self.found.changed:
            aspects = {key: pair for key, pair in _aspects(change).items() if key not in _DERIVED}
            if change.name in skipped or _module(change.name) in self.modules or not aspects:
                continue
            if self.batch_sizes[0] != self.batch_sizes[1] and self._follows_batch(aspects):
                continue
            for key, pair in aspects.items():
                yield Change(change.name, *pair, _ALL[1:3], is_graph=True, aspect=key)

    def _follows_batch(self, aspects: Mapping[str, tuple[str, str]]) -> bool:
        """Return True if all differing arguments of a function contain the batch size, such as a shape."""
        sizes = [str(size) for size in self.batch_sizes]
        return all(size in pair[place] for pair in aspects.values() for place, size in enumerate(sizes))

    def _optimizers(self) -> Iterator[Change]:
        gone, come = (
            [name for name in names if name in self.optimizers] for names in (self.found.removed, self.found.added)
        )
        if gone and come:  # with gradient accumulation, the first batch has no optimizer step
            yield Change("optimizer", ", ".join(gone), ", ".join(come), (Phase.UPDATE,))

    def _edges(self) -> Iterator[Change]:
        for change in self.found.changed:
            aspects = _aspects(change)
            if "takes" in aspects and change.name not in self.modules:
                yield Change(change.name, *aspects["takes"], _ALL[1:3], is_graph=True, aspect="takes")


def _batch_size(graph: Graph) -> int | None:
    shapes = [meta.shape for node in graph.nodes if node.kind == "input" for meta in node.outputs]
    return next((shape[0] for shape in shapes if shape), None)


def _module(name: str) -> str:
    return name.partition(" (call ")[0]


def _owner(name: str) -> str:
    """Return the module that calls a function."""
    return _module(name.rpartition("/")[0])


def _is_inside(name: str, owners: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:depth]) in owners for depth in range(1, len(parts) + 1))


def _aspects(change: NodeChange) -> dict[str, tuple[str, str]]:
    found = {}
    for text in change.aspects:
        aspect, _, values = text.partition(": ")
        one, _, other = values.partition(" -> ")
        found[aspect] = one, other
    return found


def _merged(changes: list[Change]) -> list[Change]:
    """Merge equal differences of several modules and calls."""
    found: dict[tuple[object, ...], list[Change]] = {}
    for change in changes:
        # Differences without two values, such as a missing function, are merged only for functions of the same name.
        kind = "" if change.one and change.other else change.what.rpartition("/")[2].partition("#")[0]
        found.setdefault((change.one, change.other, change.phases, change.aspect, kind), []).append(change)
    merged = []
    for alike in found.values():
        others = tuple(dict.fromkeys(each.what for each in alike if each.what != alike[0].what))
        merged.append(replace(alike[0], others=others))
    return merged
