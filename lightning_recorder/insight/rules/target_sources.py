"""Rules about where a target comes from, and what the prediction knows about it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from lightning_recorder.graph.model import FROZEN_HERE, Node
from lightning_recorder.insight.evidence import Evidence, View
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.parts import layers_of
from lightning_recorder.insight.recorded_step import (
    BINARY,
    RecordedStep,
    found_in,
    keeps_values,
    setting,
    shape_of,
    sides_of,
    step_of,
)
from lightning_recorder.insight.rule import GRAPH, rule
from lightning_recorder.names import Site

_ANY = ("any",)


@rule(
    "discriminator-wins",
    statistic="probabilities that a discriminator gives to real and generated samples, and gradients of the generator",
    usual="0.3 to 0.9 for real samples, and gradients of the generator that stay about as large",
    why="The discriminator learns faster than the generator. Where it is sure, the loss of the generator is flat.",
    next="Lower the learning rate of the discriminator, or train the generator with the target 1 for its samples.",
    false_alarms="A discriminator that is sure while the gradients of the generator stay large is left out.",
    needs=("activations", "parameters", GRAPH),
    records=8,
    explains=dict.fromkeys(
        ("barely-moves", "vanishing-gradient", "saturation", "does-not-move", "sudden-change", "target-scale"), _ANY
    ),
)
def discriminator_wins(
    evidence: Evidence, *, persistence: int = 4, records: int = 8, sure: float = 0.02, shrink: float = 30.0
) -> Iterator[Finding]:
    """Yield a finding if a discriminator is sure about all samples and the generator has lost its gradient."""
    step = step_of(evidence)
    learned: dict[str, list[tuple[float, float, set[str]]]] = {}
    for node in step.operations:
        source = step.behind(node) if node.name in BINARY else None
        prediction, target = sides_of(evidence, step, node)
        (least, most), _ = target.columns("min", "max")
        if source is None or len(prediction.mean) < records or least.min() != most.max():
            continue
        means = prediction.mean[-persistence:]
        chances = 1 / (1 + np.exp(-means)) if node.name.endswith("logits") else means
        layer = (step.behind(source) or source) if source.name == "sigmoid" else source
        wrong = abs(chances - least[0]).max()
        learned.setdefault(step.owner(layer), []).append((least[0], wrong, _trained_by(step, source)))
    for name, losses in learned.items():
        own = set.intersection(*(modules for _, _, modules in losses))
        generator = set.union(*(modules for _, _, modules in losses)) - own
        # The generator's loss has the target 1 for generated samples, on which a sure discriminator has a large error.
        # So the smallest error with each target is that of the discriminator's own loss.
        wrong = [min((off for least, off, _ in losses if least == target), default=1.0) for target in (0, 1)]
        norms = [each.gradient.rms for each in evidence.weights if each.module in generator]
        norms = [each for each in norms if len(each) >= records and each[0] > 0]
        fall = min((each[0] / each[-persistence:].max() for each in norms), default=0.0)
        if max(wrong) < sure and fall > shrink:
            verdict = (
                f"the discriminator that ends with {name} gives real samples {1 - wrong[1]:.4g} and generated ones "
                f"{wrong[0]:.2g}, and the gradients of the generator have become {fall:.3g} × smaller"
            )
            found = evidence.output(name).found(verdict, "rms", real=1 - wrong[1], generated=wrong[0], fall=fall)
            yield replace(found, others=tuple(sorted(generator)))
            return


def _trained_by(step: RecordedStep, node: Node) -> set[str]:
    """Return the modules whose parameters get a gradient from an operation."""
    found, seen, todo = set(), {node.id}, [node]
    while todo:
        for each in step.sources(todo.pop()):
            if each.kind == "parameter" and not each.note:
                found.add(each.name.rpartition(".")[0])
            elif each.id in step.trained and each.id not in seen:
                seen.add(each.id)
                todo.append(each)
    return found


@rule(
    "padding-as-target",
    statistic="share of the targets of cross_entropy that are the padding of an embedding of the same tokens",
    usual="the padding is ignored",
    why="The model learns to predict the padding, which is easy, and the loss looks better than the model is.",
    next="Pass ignore_index with the number of the padding to cross_entropy.",
    false_alarms="An embedding without padding_idx, and padding with another number than 0, are not known. A loss for "
    "each target, with reduction='none', is left out, since a mask usually multiplies it.",
    needs=("activations", GRAPH),
    records=4,
)
def padding_as_target(evidence: Evidence, *, persistence: int = 4, share: float = 0.2) -> Iterator[Finding]:
    """Yield the losses in which many targets are padding."""
    step = step_of(evidence)
    pads = [node for node in step.operations if node.name == "embedding" and setting(node, "padding_idx") == "0"]
    tokens = {each.id for node in pads for each in _inputs_of(step, node)}
    for node in step.operations:
        sources = step.sources(node)
        if node.name != "cross_entropy" or len(sources) < 2 or setting(node, "ignore_index") == "0":
            continue
        is_weighted = setting(node, "weight") or setting(node, "reduction").strip("'") == "none"
        if not tokens & {each.id for each in _inputs_of(step, sources[1])} or is_weighted:
            continue
        _, target = sides_of(evidence, step, node)
        zeros, steps = target.column("zero_fraction")
        if len(steps) >= persistence and (zeros[-persistence:] > share).all():
            verdict = (
                f"{np.median(zeros):.0%} of the targets of cross_entropy in {step.place(node)} are 0, the padding of "
                f"{step.owner(pads[0])}, and none is ignored"
            )
            yield replace(target.found(verdict, "zero_fraction"), module=step.owner(node), path="")
            return


def _inputs_of(step: RecordedStep, node: Node) -> list[Node]:
    """Return the model inputs that a node gets, maybe reshaped, or with some entries selected or added."""
    found, todo = [], [node]
    while todo:
        each = todo.pop()
        if each.kind == "input":
            found.append(each)
        elif each is node or keeps_values(each) or each.name in ("getitem", "narrow", "long", "clone", "chunk", "pad"):
            todo += step.sources(each)
    return found


@rule(
    "no-end-as-target",
    statistic="share of sequences whose end token is a target of cross_entropy, if all sequences of a record have one",
    usual="above 0, since texts end with a target",
    why="Without it, the model does not learn to end a text. Usually the padding token is the end token, and labels of "
    "padding are ignored.",
    next="Give the padding a token of its own, or choose the labels to ignore by the attention mask, so that the first "
    "end token counts.",
    false_alarms="The end token is that in the configuration of the model. Runs in which a sequence does not end, and "
    "targets that are not the next tokens, are left out.",
    needs=("activations",),
    records=4,
    is_lasting=True,
)
def no_end_as_target(evidence: Evidence, *, records: int = 4, share: float = 0.9) -> Iterator[Finding]:
    """Yield next-token losses whose targets never contain the end token, although each input sequence has one."""
    for each in (View(evidence, evidence.losses, site) for site in evidence.losses.places):
        after = View(evidence, evidence.losses, Site(each.module, "in.target.next")).mean
        is_never = each.path == "in.target.ends" and len(each.mean) >= records and not each.mean.any()
        if is_never and len(after) and after.min() > share:
            verdict = f"all sequences have an end token, and it is never a target of {each.module}"
            yield replace(each.found(verdict, "mean", share=0.0), path="")
            return


@rule(
    "copies-the-input",
    statistic="positions of the targets of a model whose attention sees no later position, or that has a recurrence "
    "alone, against those of the tokens that it reads",
    usual="the target of each position is the next token",
    why="Each position has its target as input, so that the model learns to copy it, and the loss falls to 0.",
    next="Compare the logits of all positions but the last with the tokens from the second one on.",
    false_alarms="Models whose attention sees later positions, such as autoencoders, and those that shift the tokens "
    "themselves, are left out.",
    needs=("activations", GRAPH),
    records=1,
    is_lasting=True,
)
def copies_the_input(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if the targets of a causal model are its input tokens at the same positions."""
    step = step_of(evidence)
    # A mask does not prove a causal model: it may hide only padding, as in an autoencoder. So the recorded attention to
    # later positions decides.
    layers = [heads[0].attention_future for heads in layers_of(evidence, evidence.heads).values()]
    seen = [future for future in layers if len(future)]
    is_causal = bool(seen) and not any(future.any() for future in seen)
    for node in step.operations:
        sources = step.sources(node)
        if node.name != "cross_entropy" or len(sources) < 2:
            continue
        tokens, logits = step.made_by(sources[1]), step.made_by(sources[0])
        if not is_causal and not _follows_each_token(step, tokens, logits):
            continue
        before = step.ancestors(node)  # other operations of the step do not count
        readers = [each for each in step.readers(tokens) if each is node or each.id in before]
        readers = readers if tokens.kind == "input" else []
        is_read = bool(readers) and all(each is node or each.name == "embedding" for each in readers)
        if is_read and len(readers) > 1 and logits.name == "linear" and tokens.id in step.ancestors(logits):
            verdict = (
                f"the targets of cross_entropy in {step.place(node)} are the tokens that the model reads at the same "
                "positions: it learns to copy them"
            )
            yield found_in(evidence, step.owner(node), verdict)
            return


_POSITION_BY_POSITION = re.compile(
    r"linear|(layer|rms)_norm|(leaky_)?relu_?|gelu|silu|tanh|dropout\d?d?|lstm|gru|rnn_\w+"
)


def _follows_each_token(step: RecordedStep, tokens: Node, logits: Node) -> bool:
    """Return True if each token reaches the logits at its position through layers and a recurrence.

    In an autoencoder, the tokens are decoded from the last state of a recurrence, which has another shape.
    """
    shape = tokens.outputs[0].shape if tokens.kind == "input" and tokens.outputs else ()
    node: Node | None = logits
    while node is not None and _POSITION_BY_POSITION.fullmatch(node.name) and (shape_of(node) or ())[:2] == shape:
        node = step.behind(node)
    return len(shape) == 2 and node is not None and node.name == "embedding" and step.behind(node) is tokens


@rule(
    "unknown-noise",
    statistic="what a regression has as target and as input, where the step draws noise",
    usual="the noise that is in the input, or the input without noise",
    why="The noise is drawn twice, or the noisy input is compared with what the model makes of it.",
    next="Draw the noise once, give the model the sum, and compare its output with the noise, or with the clean data.",
    false_alarms="A sum in which the noise has a constant factor, as in an augmentation, is left out.",
    needs=(GRAPH,),
    is_lasting=True,
)
def unknown_noise(evidence: Evidence) -> Iterator[Finding]:
    """Yield the regressions whose target is noise that the model does not get, or the noisy data that it does get."""
    step = step_of(evidence)
    for node, prediction, given in _regressions(step):
        target, known = step.made_by(given), step.ancestors(prediction)
        if target.name in _NOISE and all(each is node for each in step.readers(target)):
            verdict = (
                f"the target of {_named(node)} in {step.place(node)} is noise that the {target.name} at "
                f"{target.source} draws and nothing else uses: no output can predict it"
            )
        elif target.id in known and _is_noisy(step, target) and _is_given_to_layers(step, target):
            verdict = (
                f"the target of {_named(node)} in {step.place(node)} is the sum of data and noise that the model "
                "itself gets: it learns to return its input"
            )
        else:
            continue
        yield found_in(evidence, step.owner(node), verdict)
        return


_REGRESSIONS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
_DIFFERENCES, _POWERS = ("sub", "__sub__"), ("pow", "__pow__", "square", "abs")


def _regressions(step: RecordedStep) -> Iterator[tuple[Node, Node, Node]]:
    """Yield the regression losses with a trained prediction, and their predictions and targets.

    Losses that are written as formulas count, too.
    """
    for node in step.operations:
        sources = step.sources(node)[:2]
        if len(sources) == 2 and node.name in _REGRESSIONS and sources[0].id in step.trained:
            yield node, sources[0], sources[1]
        elif len(sources) == 2 and node.name in _DIFFERENCES and _powers_of(step, node):
            sources.sort(key=lambda each: each.id not in step.trained)
            if [each.id in step.trained for each in sources] == [True, False]:
                yield node, sources[0], sources[1]


def _powers_of(step: RecordedStep, difference: Node) -> list[Node]:
    """Return the squares and absolute values of a difference in a loss."""
    return [each for each in step.users(difference) if each.name in _POWERS and step.signs.get(each.id) == {1}]


def _named(loss: Node) -> str:
    return "the squared difference" if loss.name in _DIFFERENCES else loss.name


_NOISE = ("randn", "randn_like")


def _is_noisy(step: RecordedStep, node: Node) -> bool:
    """Return True for a sum of data and noise, each multiplied by a tensor, as in a sum with a varying noise level."""
    sources = step.sources(node) if node.name in ("add", "__add__", "add_") else []
    products = [step.sources(each) for each in sources if each.name in ("mul", "__mul__", "__rmul__", "mul_")]
    if len(products) != 2 or any(len(each) != 2 for each in products) or "parameter" in step.roots[node.id]:
        return False
    noisy = [any(step.made_by(one).name in _NOISE for one in each) for each in products]
    data = next((each for each, is_noise in zip(products, noisy, strict=True) if not is_noise), [])
    return sorted(noisy) == [False, True] and any("input" in step.roots[each.id] for each in data)


def _is_given_to_layers(step: RecordedStep, node: Node) -> bool:
    """Return True if a layer, or an operation that joins the inputs of a layer, uses the values of a node."""
    todo = list(step.readers(node))
    for each in todo:
        if any(one.kind == "parameter" for one in step.sources(each)):
            return True
        todo += step.readers(each) if each.name in ("cat", "concat") else []
    return False


@rule(
    "exchanged-quantiles",
    statistic="sign of the error in the loss of quantiles, max(q × e, (q - 1) × e)",
    usual="the error e is the target minus the prediction",
    why="With the other sign, the output for the quantile q learns 1 - q: the upper and the lower one are exchanged.",
    next="Compute e = target - prediction, or max((1 - q) × e, -q × e) for prediction - target.",
    false_alarms="Only tensors q and q - 1 count: of two numbers, such as 0.9 and -0.1, either may be the quantile.",
    needs=(GRAPH,),
    is_lasting=True,
)
def exchanged_quantiles(evidence: Evidence) -> Iterator[Finding]:
    """Yield the quantile losses whose error has the wrong sign."""
    step = step_of(evidence)
    for node in step.operations:
        parts = step.sources(node) if node.name in ("max", "maximum") else []
        factors = [step.sources(each) for each in parts if each.name.strip("_") in ("mul", "rmul", "multiply")]
        if len(parts) != 2 or [len(each) for each in factors] != [2, 2]:
            continue
        errors = [each for each in factors[0] if any(each is other for other in factors[1])]
        levels = [each for one in factors for each in one if each not in errors]
        if len(errors) == 1 and len(levels) == 2 and (_is_less(step, *levels) or _is_less(step, *levels[::-1])):
            error, sign = errors[0], 1
            while error.name in ("neg", "__neg__") and step.sources(error):
                error, sign = step.sources(error)[0], -sign
            trained = [each.id in step.trained for each in step.sources(error)] if error.name in _DIFFERENCES else []
            if trained == ([True, False] if sign > 0 else [False, True]):
                verdict = (
                    f"the loss in {step.place(node)} is max(q × e, (q - 1) × e), where e is the prediction minus the "
                    "target: the outputs learn the quantiles 1 - q"
                )
                yield found_in(evidence, step.owner(node), verdict)
                return


def _is_less(step: RecordedStep, one: Node, other: Node) -> bool:
    """Return True if ``one`` is ``other`` minus 1 and depends on no parameter."""
    is_less = one.name in _DIFFERENCES and setting(one, "other") in ("1", "1.0")
    return is_less and step.sources(one) == [other] and "parameter" not in step.roots[one.id]


@rule(
    "largest-value",
    statistic="which output of a network a regression compares with a reward plus the largest value of the next state",
    usual="the output of the action that was taken",
    why="The largest output belongs to the action that the network prefers, and the reward to the one that was taken.",
    next="Choose the output of the action: values.gather(1, actions.unsqueeze(1)).squeeze(1).",
    false_alarms="The target must have the largest output for another state, and a number of the batch in a sum.",
    needs=(GRAPH,),
    is_lasting=True,
)
def largest_value(evidence: Evidence) -> Iterator[Finding]:
    """Yield Q-learning losses that train the largest value instead of the value of the chosen action."""
    step = step_of(evidence)
    for node, prediction, target in _regressions(step):
        best, total = step.made_by(prediction), step.made_by(target)
        terms = step.sources(total) if total.name.strip("_") in ("add", "radd", "iadd") else []
        values = [each for each in terms if "parameter" in step.roots[each.id]]
        is_sum = len(terms) == 2 and len(values) == 1 and any(step.roots[each.id] == {"input"} for each in terms)
        next_best = [step.graph[each] for each in step.ancestors(values[0])] if is_sum else []
        if _is_largest(best) and any(_is_largest(each) for each in next_best) and best.id not in step.ancestors(total):
            verdict = (
                f"{_named(node)} in {step.place(node)} compares the largest of the outputs with a reward plus the "
                "largest value of the next state, whichever action was taken"
            )
            yield found_in(evidence, step.owner(node), verdict)
            return


def _is_largest(node: Node) -> bool:
    return node.kind == "op" and node.name in ("max", "amax") and len(node.inputs) == 1 and setting(node, "dim") != ""


@rule(
    "raised-values",
    statistic="layers that a regression fits, and whose mean output the same backward pass raises",
    usual="the loss of an actor trains the actor alone",
    why="One loss has the error of the critic and minus its values for the actions of the actor. The critic lowers the "
    "second part by larger values, for whatever action.",
    next="Give the actor an optimizer of its own, or freeze the critic's parameters in its loss.",
    false_alarms="Several optimizers or backward passes are left out, as are a critic that is frozen for this part of "
    "the loss and a mean that follows from the critic alone.",
    needs=(GRAPH,),
    explains=dict.fromkeys(("saturation", "weight-drift", "vanishing-gradient"), _ANY),
    is_lasting=True,
)
def raised_values(evidence: Evidence) -> Iterator[Finding]:
    """Yield a critic that the actor's loss trains to return larger values."""
    step = step_of(evidence)
    kinds = [node.kind for node in step.graph.nodes]
    if kinds.count("optimizer") != 1 or kinds.count("backward") != 1:
        return
    fitted = {}
    for node, prediction, target in _regressions(step):
        layer = _layer_of(step, prediction)
        is_added = step.signs.get(node.id) == {1} or bool(_powers_of(step, node))
        if layer is not None and is_added and target.id not in step.trained and _weight_of(step, layer):
            fitted[_weight_of(step, layer)] = node, layer
    for node in step.operations:
        given = step.sources(node) if node.name == "mean" and step.signs.get(node.id) == {-1} else []
        layer = _layer_of(step, given[0]) if given else None
        if layer is None or _weight_of(step, layer) not in fitted or layer.note == FROZEN_HERE:
            continue
        loss, critic = fitted[_weight_of(step, layer)]
        actor = _trained_by(step, layer) - _trained_by(step, critic)
        if actor and step.owner(layer):
            verdict = (
                f"the loss has minus the mean output of {step.owner(layer)} in {step.place(node)}, and one optimizer "
                f"trains both {sorted(actor)[0]} and {step.owner(layer)} with it, which {_named(loss)} fits: the "
                "loss falls without bound"
            )
            yield replace(found_in(evidence, step.owner(layer), verdict), others=tuple(sorted(actor)))
            return


def _layer_of(step: RecordedStep, node: Node) -> Node | None:
    """Return the linear layer whose output, or a selection of it, is the value of a node."""
    source: Node | None = step.made_by(node)
    while source is not None and source.name in ("getitem", "select"):
        source = step.behind(source)
    return source if source is not None and source.name == "linear" else None


def _weight_of(step: RecordedStep, layer: Node) -> int:
    """Return the id of the trained weight of a layer; 0 if it has none."""
    return next((each.id for each in step.sources(layer) if each.kind == "parameter" and not each.note), 0)


@rule(
    "seen-targets",
    "note",
    statistic="targets of a cross-entropy, if the step hides some of the tokens that the model reads at random",
    usual="the hidden tokens, and -100 for the others",
    why="Most targets are tokens that the model sees, so that most of the loss is copying.",
    next="Set the targets of the tokens that are not hidden to -100, unless the model is to repair the whole text.",
    false_alarms="Models that repair a whole text, and so count all tokens on purpose: it is a note.",
    needs=(GRAPH,),
    is_lasting=True,
)
def seen_targets(evidence: Evidence) -> Iterator[Finding]:
    """Yield losses over all tokens in steps that hide random tokens. Only the hidden tokens should count."""
    step = step_of(evidence)
    for node in step.operations:
        sources = step.sources(node)
        if node.name != "cross_entropy" or len(sources) < 2 or setting(node, "reduction") == "'none'":
            continue
        tokens, before = step.made_by(sources[1]), step.ancestors(sources[0])
        readers = [each for each in step.readers(tokens) if each.id in before]
        if tokens.kind != "input" or not readers or not all(_hides(step, each) for each in readers):
            continue
        verdict = (
            f"the targets of {node.name} in {step.place(node)} are all tokens, and the {readers[0].name} at "
            f"{readers[0].source} hides some of them from the model: it sees the others"
        )
        yield found_in(evidence, step.owner(node), verdict)
        return


def _hides(step: RecordedStep, node: Node) -> bool:
    """Return True if an operation replaces random tokens before an embedding."""
    random = {step.graph[each].name for each in step.ancestors(node)} & {"rand", "rand_like", "bernoulli", "bernoulli_"}
    is_read = any(each.name == "embedding" for each in step.readers(node))
    return node.name in ("masked_fill", "masked_fill_", "where", "setitem", "index_put_") and bool(random) and is_read


@rule(
    "shifted-twice",
    statistic="share of the targets of cross_entropy that are the token after the next one of the input",
    usual="the targets are the next tokens",
    why="This is so if tokens are shifted in the data set or in the step, and again in the model, as those of "
    "transformers do.",
    next="Pass the tokens themselves as labels to a model that shifts them.",
    false_alarms="Models that predict the token after the next one on purpose. A model with another loss for the next "
    "tokens is left out.",
    needs=("activations",),
    records=2,
    is_lasting=True,
)
def shifted_twice(evidence: Evidence, *, share: float = 0.9) -> Iterator[Finding]:
    """Yield a finding if the targets are shifted by two tokens, and no loss has the next tokens as targets."""
    losses = [View(evidence, evidence.losses, site) for site in evidence.losses.places]
    if any((each.mean > share).any() for each in losses if each.path == "in.target.next"):
        return
    for each in losses:
        if each.path == "in.target.after_next" and len(shares := each.mean) and min(shares) > share:
            verdict = f"{shares[-1]:.0%} of the targets of {each.module} are the token after the next one"
            yield each.found(verdict, "mean", share=float(shares[-1]))
            return


@rule(
    "generator-helps",
    statistic="targets of the losses of a discriminator, or signs of the scores of a critic: for generated samples, "
    "and for those whose gradient reaches the generator",
    usual="two different numbers, such as 0 and 1",
    why="The generator is trained to be recognized: its loss has the labels that the discriminator has for generated "
    "samples.",
    next="Give the loss of the generator the label of real samples.",
    false_alarms="The discriminator must have a loss of its own for each of both labels, and the generator's all have "
    "the same one.",
    needs=("activations", GRAPH),
    records=2,
    explains=dict.fromkeys(("discriminator-wins", "barely-moves", "vanishing-gradient"), _ANY),
    is_lasting=True,
)
def generator_helps(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if generator and discriminator losses have the same labels for generated samples."""
    step = step_of(evidence)
    losses: dict[tuple[str, str], list[tuple[float, set[str], set[str], Node]]] = {}
    for node in step.operations:
        source, label = step.behind(node), None
        signs = step.signs.get(node.id, set())
        (least, most), _ = sides_of(evidence, step, node)[1].columns("min", "max")
        if node.name in (*BINARY, "mse_loss") and len(least) and least.min() == most.max():
            label = float(least[0])
        # The critic of a Wasserstein GAN has signs instead of labels: its scores are raised or lowered.
        elif node.name == "mean" and len(signs) == 1 and node.outputs and not node.outputs[0].shape:
            label = float(next(iter(signs)))
        if source is None or label is None:
            continue
        known = [evidence.graph[each] for each in step.ancestors(node)]
        before = {each.name.rpartition(".")[0] for each in known if each.kind == "parameter"}
        layer = (step.behind(source) or source) if source.name == "sigmoid" else source
        if node.name != "mean" or layer.name in ("linear", "conv2d"):
            kind = "mean" if node.name == "mean" else ""
            losses.setdefault((step.owner(layer), kind), []).append((label, _trained_by(step, source), before, node))
    for (name, kind), found in losses.items():
        own = set.intersection(*(trained for _, trained, _, _ in found))
        # Of losses with labels, only minimized terms count, since a generator may also maximize the discriminator's
        # loss, with the discriminator's labels.
        of_generator = [each for each in found if each[1] - own and (kind or step.signs.get(each[3].id) == {1})]
        generator = set.union(set(), *(trained - own for _, trained, _, _ in of_generator))
        others = [(label, bool(before & generator)) for label, trained, before, _ in found if not trained - own]
        labels = {each[0] for each in of_generator}
        made, real = ({label for label, is_made in others if is_made is each} for each in (True, False))
        # The fault: the discriminator's loss has the same label for detached generated samples, and another label for
        # real samples.
        if len(labels) == 1 and made == labels and real - labels:
            node, (label,) = of_generator[0][3], labels
            way = "smaller" if label > 0 else "larger"
            verdict = (
                f"the loss of the generator in {step.place(node)} makes the scores of its samples {way}, as that of "
                f"the critic that ends with {name} does"
                if kind
                else f"{node.name} in {step.place(node)} trains the generator with the target {label:.3g}, which the "
                f"discriminator that ends with {name} also has for generated samples"
            )
            found_one = replace(found_in(evidence, name, verdict), others=tuple(sorted(generator)))
            yield replace(found_one, next="Change the sign of the generator's loss.") if kind else found_one
            return
