"""Programs with a fault that others reported, each with its repaired twin, and the table of what the findings say.

``python -m tests.insight.corpus.exam FOLDER [PATTERN]`` trains both versions of each program and prints the table. The
programs are our own: a report gives the fault, and the data are small.
"""

from __future__ import annotations

import copy
import fnmatch
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_recorder import GraphRecorder, Outputs, default_recorders, open_recording
from lightning_recorder.insight import Finding
from tests.insight.corpus.healthy import stack
from tests.insight.corpus.task import Task, adam, digits, images, random, sgd

__all__ = ["PROGRAMS", "Program", "findings_of", "mark_of"]

Mark = Literal["named", "seen", "wrong", "silent"]


@dataclass(frozen=True)
class Program:
    """A program in two versions.

    Args:
        make: A function that makes the task, faulty or repaired.
        fault: The fault, in a few words.
        source: The report of such a fault.
        rules: The rules that name the cause; empty for a fault whose cause the findings are known not to name.
        missed: The mark of such a fault: nothing is found, or a consequence is.
    """

    make: Callable[[bool], Task]
    fault: str
    source: str
    rules: tuple[str, ...]
    missed: Mark


PROGRAMS: dict[str, Program] = {}


def program(
    rules: str, fault: str, source: str, missed: Mark = "silent"
) -> Callable[[Callable[[bool], Task]], Callable[[bool], Task]]:
    """Register a function that makes a task, which is faulty if its argument is True."""

    def register(make: Callable[[bool], Task]) -> Callable[[bool], Task]:
        PROGRAMS[make.__name__] = Program(make, fault, source, tuple(rules.split()), missed)
        return make

    return register


_DEEPFD = "DeepFD (ICSE 22)"
_FORUM = "PYSIASSIST (SANER 24), forum posts"
_FORMS = "DEForm (2026)"


def stacked(*last: nn.Module, inputs: int = 64, outputs: int = 10) -> nn.Sequential:
    """Return two hidden layers, and a head with further modules after it."""
    return nn.Sequential(stack(inputs, 32, 32, outputs), *last)


def on_digits(loss: Callable[[Tensor, Tensor], Tensor], net: nn.Module | None = None, **options: Any) -> Task:
    """Return a classification of digits; the loss gets the output of the net and the classes."""
    return Task(net or stacked(), digits, lambda net, batch: loss(net(batch[0]), batch[1]), **options)


def numbers(step: int, scale: float = 1.0, mean: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return rows, ``[32, 8]``, and numbers to predict, ``[32, 1]``."""
    x = torch.randn(32, 8, generator=random(step))
    return x, mean + scale * (x[:, :1] + 0.5 * x[:, 1:2])


def regression(*last: nn.Module, scale: float = 1.0, mean: float = 0.0) -> Task:
    net = stacked(*last, inputs=8, outputs=1)
    return Task(
        net,
        lambda step: numbers(step, scale, mean),
        lambda net, batch: F.mse_loss(net(batch[0]), batch[1]),
        optimizer=adam(1e-2),
    )


# The loss and what it gets.


@program("output-range", "sigmoid on one unit for targets about 47", _DEEPFD)
def sigmoid_for_prices(is_faulty: bool) -> Task:
    return regression(nn.Sigmoid(), scale=8, mean=47) if is_faulty else regression()


@program("output-range", "ReLU output for targets on both sides of 0", _DEEPFD)
def relu_for_signed_targets(is_faulty: bool) -> Task:
    return regression(*[nn.ReLU()] * is_faulty)


@program("output-range", "labels of -1 and 1 for a binary cross-entropy", _FORUM)
def labels_of_both_signs(is_faulty: bool) -> Task:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = numbers(step)
        return x, y.sign() if is_faulty else (y > 0).float()

    net = stacked(inputs=8, outputs=1)
    return Task(net, batch, lambda net, batch: F.binary_cross_entropy_with_logits(net(batch[0]), batch[1]))


@program("output-range", "softmax for several labels of a sample", _FORUM)
def softmax_for_several_labels(is_faulty: bool) -> Task:
    def loss(y: Tensor, classes: Tensor) -> Tensor:
        labels = torch.stack([classes % 2 == 0, classes > 4, classes % 3 == 0], 1).float()
        return F.binary_cross_entropy(y, labels)

    return on_digits(loss, stacked(nn.Softmax(1) if is_faulty else nn.Sigmoid(), outputs=3))


@program("classes-by-error", "squared error on a softmax for classes", _DEEPFD)
def squared_error_of_softmax(is_faulty: bool) -> Task:
    if is_faulty:
        return on_digits(lambda y, classes: F.mse_loss(y, F.one_hot(classes, 10).float()), stacked(nn.Softmax(1)))
    return on_digits(F.cross_entropy)


@program("double-activation", "softmax before cross_entropy", _FORUM)
def softmax_before_cross_entropy(is_faulty: bool) -> Task:
    return on_digits(F.cross_entropy, stacked(*[nn.Softmax(1)] * is_faulty))


@program("double-activation", "log_softmax of a softmax", _FORUM)
def two_softmaxes(is_faulty: bool) -> Task:
    return on_digits(F.nll_loss, stacked(*[nn.Softmax(1)] * is_faulty, nn.LogSoftmax(1)))


@program("cut-off-logits", "sigmoid outputs for a categorical cross-entropy", _DEEPFD)
def sigmoid_before_cross_entropy(is_faulty: bool) -> Task:
    return on_digits(F.cross_entropy, stacked(*[nn.Sigmoid()] * is_faulty))


@program("loss-shapes", "a column compared with a vector, in a loss written by hand", "deepset-ai/FARM#229")
def column_against_vector(is_faulty: bool) -> Task:
    def loss(net: Any, batch: Any) -> Tensor:
        x, y = batch
        prediction: Tensor = net(x) if is_faulty else net(x).squeeze(1)
        error: Tensor = (prediction - y.squeeze(1)).pow(2).mean()
        return error

    return Task(stacked(inputs=8, outputs=1), numbers, loss)


@program("constant-target", "labels divided away by a conversion to whole numbers", _FORUM)
def labels_divided_away(is_faulty: bool) -> Task:
    return on_digits(lambda y, classes: F.cross_entropy(y, (classes / 10).long() if is_faulty else classes))


@program("label-smoothing", "label_smoothing=1 instead of 0.1", _FORUM)
def smoothing_of_one(is_faulty: bool) -> Task:
    smoothing = 1.0 if is_faulty else 0.1
    return on_digits(lambda y, classes: F.cross_entropy(y, classes, label_smoothing=smoothing))


@program("cut-off-logits", "dropout behind the last layer", _FORUM)
def dropout_of_logits(is_faulty: bool) -> Task:
    return on_digits(F.cross_entropy, stacked(*[nn.Dropout(0.5)] * is_faulty))


@program("cosine-logits", "cosines of pairs without a temperature", _FORUM)
def cosines_as_logits(is_faulty: bool) -> Task:
    def loss(net: Any, batch: Any) -> Tensor:
        x = batch[0]
        one, two = (F.normalize(net(x + 0.1 * torch.randn_like(x)), dim=1) for _ in range(2))
        return F.cross_entropy(one @ two.T / (1 if is_faulty else 0.1), torch.arange(len(x)))

    return Task(stack(64, 32, 16), digits, loss)


@program("overlap-of-logits", "a dice loss of logits", _FORUM)
def dice_of_logits(is_faulty: bool) -> Task:
    def loss(net: Any, batch: Any) -> Tensor:
        y = net(batch[0]) if is_faulty else net(batch[0]).sigmoid()
        dice: Tensor = (2 * (y * batch[1]).sum() + 1) / (y.sum() + batch[1].sum() + 1)
        return 1 - dice

    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
    return Task(net, lambda step: (x := images(step)[0], (x > 0.5).float()), loss)


# Dimensions.


@program("along-batch", "softmax over the samples", _FORUM)
def softmax_over_samples(is_faulty: bool) -> Task:
    dim = 0 if is_faulty else 1
    return on_digits(lambda y, classes: F.nll_loss((y.softmax(dim) + 1e-8).log(), classes))


def walks(step: int) -> tuple[Tensor, Tensor]:
    """Return random walks, ``[32, 12, 3]``, and the side on which they end."""
    x = torch.randn(32, 12, 3, generator=random(step)).cumsum(1)
    return x, (x[:, -1, 0] > 0).long()


@program("exchanged-by-view", "view instead of transpose before an LSTM", _FORUM)
def view_for_transpose(is_faulty: bool) -> Task:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.LSTM(3, 16), nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = x.view(12, 32, 3) if is_faulty else x.transpose(0, 1)
            logits: Tensor = self.head(self.rnn(x)[0][-1])
            return logits

    return Task(Net(), walks, optimizer=adam(1e-2))


@program("exchanged-by-view", "view of the last states of an LSTM, which begin with the direction", _FORUM)
def states_viewed(is_faulty: bool) -> Task:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.LSTM(3, 16, batch_first=True, bidirectional=True), nn.Linear(32, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.rnn(x)[1][0]
            logits: Tensor = self.head(h.view(32, 32) if is_faulty else h.transpose(0, 1).flatten(1))
            return logits

    return Task(Net(), walks, optimizer=adam(1e-2))


def tokens(step: int) -> tuple[Tensor, Tensor]:
    """Return sequences that count up in steps of one to three, ``[32, 12]``, and the class of their step."""
    stride = torch.randint(1, 4, (32, 1), generator=random(step))
    return (torch.randint(16, (32, 1), generator=random(step + 1)) + stride * torch.arange(12)) % 16, stride[:, 0] - 1


class Pooled(nn.Module):
    """Mean of embeddings, over the positions or, by mistake, over the samples."""

    def __init__(self, is_faulty: bool) -> None:
        super().__init__()
        self.embedding, self.body, self.is_faulty = nn.Embedding(16, 16), stacked(inputs=16, outputs=3), is_faulty

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        logits: Tensor = self.body(x.mean(0)[:1].expand(len(ids), -1) if self.is_faulty else x.mean(1))
        return logits


@program("along-batch", "mean over the samples instead of the positions", _FORUM)
def mean_over_samples(is_faulty: bool) -> Task:
    return Task(Pooled(is_faulty), tokens)


@program("input-scale", "embeddings limited to a norm of 0.001", _FORUM)
def embeddings_near_zero(is_faulty: bool) -> Task:
    net = Pooled(False)
    net.embedding = nn.Embedding(16, 16, max_norm=1e-3 if is_faulty else None)
    return Task(net, tokens)


@program("along-batch", "normalization over all samples and features", _FORUM)
def normalized_as_a_whole(is_faulty: bool) -> Task:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(64, 32), nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            x = (x - x.mean()) / x.std() if is_faulty else F.layer_norm(x, (32,))
            logits: Tensor = self.head(x.relu())
            return logits

    return on_digits(F.cross_entropy, Net())


# Language models.


class Causal(nn.Module):
    """A language model of one attention layer.

    Args:
        mask: A function from a matrix of ones to the positions that the attention leaves out; None for no mask.
        has_positions: True for an embedding of the positions.
    """

    def __init__(self, mask: Callable[[Tensor], Tensor] | None, has_positions: bool = True) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(16, 32), nn.Embedding(12, 32) if has_positions else None
        self.mix, self.norm, self.head = nn.Linear(32, 96), nn.LayerNorm(32), nn.Linear(32, 16)
        self.mask = mask

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1]))
        q, k, v = self.mix(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / 32**0.5
        if self.mask is not None:
            scores = scores.masked_fill(self.mask(torch.ones(scores.shape[1:], dtype=torch.bool)), -1e9)
        logits: Tensor = self.head(self.norm(x + scores.softmax(-1) @ v))
        return logits


def above(ones: Tensor) -> Tensor:
    return ones.triu(1)


def language(net: nn.Module, is_shifted: bool = True) -> Task:
    def loss(net: Any, batch: Any) -> Tensor:
        ids = batch[0]
        if not is_shifted:
            return F.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
        return F.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return Task(net, tokens, loss)


@program("sees-the-target attends-the-target", "no causal mask", "paiml/entrenar#310")
def no_causal_mask(is_faulty: bool) -> Task:
    return language(Causal(None if is_faulty else above))


@program("inverted-mask", "the mask leaves out the past", _FORMS)
def mask_of_the_other_triangle(is_faulty: bool) -> Task:
    return language(Causal((lambda ones: ones.tril(-1)) if is_faulty else above))


@program("copies-the-input", "targets that are not shifted", _FORUM)
def targets_not_shifted(is_faulty: bool) -> Task:
    return language(Causal(above), is_shifted=not is_faulty)


@program("padding-as-target", "padding counts as a target", _FORUM)
def padding_as_target(is_faulty: bool) -> Task:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(16, 16, padding_idx=0), nn.Linear(32, 16)
            self.rnn = nn.GRU(16, 32, batch_first=True)

        def forward(self, ids: Tensor) -> Tensor:
            logits: Tensor = self.head(self.rnn(self.embedding(ids))[0])
            return logits.flatten(0, 1)

    def batch(step: int) -> Tensor:
        return tokens(step)[0] * (torch.arange(12) < 4)

    ignored = -100 if is_faulty else 0
    return Task(
        Net(), batch, lambda net, ids: F.cross_entropy(net(ids[:, :-1]), ids[:, 1:].flatten(), ignore_index=ignored)
    )


# Gradients, weights and settings.


@program("gradient-stops", "detach between encoder and decoder", _FORUM)
def encoder_detached(is_faulty: bool) -> Task:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = stack(64, 32, 8), stack(8, 32, 64)

        def forward(self, x: Tensor) -> Tensor:
            code: Tensor = self.encoder(x)
            output: Tensor = self.decoder(code.detach() if is_faulty else code)
            return output

    return Task(Net(), digits, lambda net, batch: F.mse_loss(net(batch[0]), batch[0]))


@program("no-stop-gradient collapsed-embedding", "two views, and no side is detached", "lightly-ai/lightly#559")
def two_views_attached(is_faulty: bool) -> Task:
    net = nn.Sequential(stack(64, 64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
    net.append(stack(16, 8, 16))

    def loss(net: Any, batch: Any) -> Tensor:
        z, w = (net[:4](batch[0] + 0.5 * torch.randn_like(batch[0])) for _ in range(2))
        p, q = net[4](z), net[4](w)
        if not is_faulty:
            z, w = z.detach(), w.detach()
        return -(F.cosine_similarity(p, w).mean() + F.cosine_similarity(q, z).mean()) / 2

    return Task(net, digits, loss, optimizer=sgd(0.1))


@program("not-registered", "layers in a Python list", _FORUM)
def layers_in_a_list(is_faulty: bool) -> Task:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [nn.Linear(64, 32), nn.Linear(32, 32)]
            self.layers: Any = layers if is_faulty else nn.ModuleList(layers)
            self.head = nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x).relu()
            logits: Tensor = self.head(x)
            return logits

    return on_digits(F.cross_entropy, Net())


@program("made-in-forward", "a layer made in forward", _FORUM)
def layer_made_in_forward(is_faulty: bool) -> Task:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(64, 32), nn.Linear(32, 10)
            self.middle = None if is_faulty else nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            middle = self.middle or nn.Linear(32, 32)
            logits: Tensor = self.head(middle(self.first(x).relu()).relu())
            return logits

    return on_digits(F.cross_entropy, Net())


@program("constant-weight", "all weights zero", "DeepCrime (ISSTA 21)")
def weights_of_zero(is_faulty: bool) -> Task:
    net = stacked()
    for each in net.parameters() if is_faulty else ():
        nn.init.zeros_(each)
    return on_digits(F.cross_entropy, net)


@program("no-activation", "no activation between the layers", _DEEPFD)
def no_activation(is_faulty: bool) -> Task:
    act = nn.Identity if is_faulty else nn.ReLU
    return on_digits(F.cross_entropy, stack(64, 32, 32, 10, act=act))


@program("input-scale", "pixels from 0 to 255", _DEEPFD)
def pixels_up_to_255(is_faulty: bool) -> Task:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = images(step)
        return (x * 0.38 + 0.3) * 255 if is_faulty else x, y

    return Task(nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)), batch)


@program("input-scale", "pixels divided by 255 twice", _DEEPFD)
def pixels_divided_twice(is_faulty: bool) -> Task:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = digits(step)
        return (x * 0.38 + 0.3) / (255 if is_faulty else 1), y

    return Task(stacked(), batch)


@program("learning-rate-vanishes", "a scheduler that steps with each batch", "ivadomed/ivadomed#55")
def schedule_per_batch(is_faulty: bool) -> Task:
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 3 if is_faulty else 100, 0.5)

    return on_digits(F.cross_entropy, optimizer=sgd(), schedule=schedule)


@program("weight-drift weight-decay-too-strong", "weight decay of 1 in Adam", _FORUM)
def weight_decay_of_one(is_faulty: bool) -> Task:
    decay = 1.0 if is_faulty else 1e-4
    return on_digits(
        F.cross_entropy, optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3, weight_decay=decay)
    )


class Variational(nn.Module):
    """A variational autoencoder that returns the reconstruction and the KL divergence of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = stack(64, 32, 32), stack(4, 32, 64)
        self.mean, self.scale = nn.Linear(32, 4), nn.Linear(32, 4)

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.encoder(x).relu()
        mean, scale = self.mean(hidden), self.scale(hidden)
        sample = mean + torch.randn_like(mean) * (0.5 * scale).exp()
        return self.decoder(sample), -0.5 * (1 + scale - mean.pow(2) - scale.exp()).sum(1)


def variational(weight: float | None) -> Task:
    def loss(net: nn.Module, batch: Any) -> Tensor:
        x, divergence = net(batch[0])
        error = F.mse_loss(x, batch[0], reduction="sum") / len(x)
        return error if weight is None else error + weight * divergence.mean()

    return Task(Variational(), digits, loss)


@program("latent-without-prior", "the KL divergence is computed and not added", _FORUM)
def divergence_not_added(is_faulty: bool) -> Task:
    return variational(None if is_faulty else 1.0)


@program("prior-pushed-away", "the KL divergence is subtracted", "Unakar/Logic-RL#58, kind of fault")
def divergence_subtracted(is_faulty: bool) -> Task:
    return variational(-1.0 if is_faulty else 1.0)


@program("maximized-loss", "the mean logarithm of the probabilities without a minus", _FORUM)
def likelihood_without_minus(is_faulty: bool) -> Task:
    def loss(y: Tensor, classes: Tensor) -> Tensor:
        found = y.log_softmax(1).gather(1, classes[:, None]).mean()
        return found if is_faulty else -found

    return on_digits(loss)


@program("scaled-twice", "logits divided by the temperature in the model and in the loss", _FORUM)
def temperature_twice(is_faulty: bool) -> Task:
    return on_digits(lambda y, classes: F.cross_entropy(y / 20 / 20 if is_faulty else y / 20, classes))


@program("norm-momentum", "momentum of BatchNorm as in Keras", _FORUM)
def momentum_of_keras(is_faulty: bool) -> Task:
    net = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32, momentum=0.99 if is_faulty else 0.01), nn.ReLU())
    return on_digits(F.cross_entropy, net.append(nn.Linear(32, 10)))


def padded(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return sequences of 3 to 11 tokens with padding behind them, ``[32, 40]``, their lengths and classes."""
    generator = random(step)
    ids = torch.randint(1, 12, (32, 40), generator=generator)
    lengths = torch.randint(3, 12, (32,), generator=generator)
    classes = ids[torch.arange(32), lengths - 1] % 4
    return ids.masked_fill(torch.arange(40) >= lengths[:, None], 0), lengths, classes


class LastState(nn.Module):
    """A classifier of sequences by the output of an LSTM at their end."""

    def __init__(self, is_after_padding: bool) -> None:
        super().__init__()
        self.is_after_padding = is_after_padding
        self.tokens, self.recurrence = nn.Embedding(12, 16, padding_idx=0), nn.LSTM(16, 32, batch_first=True)
        self.head = nn.Linear(32, 4)

    @override
    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        states, _ = self.recurrence(self.tokens(ids))
        last = states[:, -1] if self.is_after_padding else states[torch.arange(len(ids)), lengths - 1]
        output: Tensor = self.head(last)
        return output


@program("padding-is-read", "the output of an LSTM after the padding", "ray-project/ray#21392")
def state_after_padding(is_faulty: bool) -> Task:
    def loss(net: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(net(*batch[:2]), batch[2])

    return Task(LastState(is_faulty), padded, loss, optimizer=adam(3e-3))


@program("constant-target", "pairs that all have class 0", _FORUM)
def class_of_all_pairs(is_faulty: bool) -> Task:
    def loss(net: nn.Module, batch: Any) -> Tensor:
        one, other = (F.normalize(net(batch[0] + 0.3 * torch.randn_like(batch[0])), dim=1) for _ in range(2))
        places = torch.zeros(len(one), dtype=torch.long) if is_faulty else torch.arange(len(one))
        return F.cross_entropy(one @ other.T / 0.1, places)

    return Task(stacked(outputs=16), digits, loss)


@program("set-back", "old weights are loaded before each step", "TrainCheck (OSDI 25), kind of fault")
def weights_loaded_again(is_faulty: bool) -> Task:
    task = Task(stacked())
    old = copy.deepcopy(task.net.state_dict())
    task.events = dict.fromkeys(range(task.steps) if is_faulty else (), lambda: task.net.load_state_dict(old))
    return task


# Losses that are written by hand.


@program("focal-weight", "a focal loss whose weight is computed from the mean of the batch", "andrijdavid/FocalLoss#2")
def focal_loss_of_the_mean(is_faulty: bool) -> Task:
    def loss(logits: Tensor, classes: Tensor) -> Tensor:
        error = F.cross_entropy(logits, classes, reduction="mean" if is_faulty else "none")
        return ((1 - (-error).exp()) ** 2 * error).mean()

    return on_digits(loss)


@program("focal-weight", "a focal loss with (1 - p)^gamma for the classes that are wrong", "yqyao/SSD_Pytorch#32")
def focal_loss_of_the_sure(is_faulty: bool) -> Task:
    def loss(logits: Tensor, classes: Tensor) -> Tensor:
        p, right = logits.sigmoid().clamp(1e-6, 1 - 1e-6), F.one_hot(classes, 10).float()
        wrong = (1 - p if is_faulty else p) ** 2 * (1 - p).log() * (1 - right)
        return -((1 - p) ** 2 * p.log() * right + wrong).mean()

    return on_digits(loss)


@program("cosine-logits", "products of vectors with themselves among the pairs", "Sara-Ahmed/SiT#26, kind of fault")
def products_with_themselves(is_faulty: bool) -> Task:
    def loss(net: nn.Module, batch: Any) -> Tensor:
        views = [F.normalize(net(batch[0] + 0.3 * torch.randn_like(batch[0])), dim=1) for _ in range(2)]
        both, places = torch.cat(views), torch.arange(2 * len(batch[0])).roll(len(batch[0]))
        logits = both @ both.T / 0.1
        return F.cross_entropy(logits if is_faulty else logits.masked_fill(torch.eye(len(both)) > 0, -1e9), places)

    return Task(stacked(outputs=16), digits, loss)


@program(
    "compared-with-itself",
    "a teacher that is compared with itself",
    "labmlai/annotated_deep_learning_paper_implementations#66",
)
def teacher_beside_itself(is_faulty: bool) -> Task:
    net = nn.ModuleDict({"student": stacked(), "teacher": stacked().requires_grad_(False)})

    def loss(net: Any, batch: Any) -> Tensor:
        student, teacher = net["student"](batch[0]), net["teacher"](batch[0])
        given = teacher if is_faulty else student
        return F.cross_entropy(student, batch[1]) + F.kl_div(given.log_softmax(1), teacher.softmax(1))

    return Task(net, digits, loss)


def rewards(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return states, ``[64, 4]``, actions and rewards for the right ones."""
    states = torch.randn(64, 4, generator=random(step))
    actions = torch.randint(2, (64,), generator=random(step + 1))
    return states, actions, ((states[:, 0] > 0) == (actions == 1)).float()


def actor_critic(*, is_attached: bool = False, bonus: float = 0.05) -> Task:
    net = nn.ModuleDict({"actor": stacked(inputs=4, outputs=2), "critic": stacked(inputs=4, outputs=1)})

    def loss(net: Any, batch: Any) -> Tensor:
        states, actions, found = batch
        value, logs = net["critic"](states)[:, 0], net["actor"](states).log_softmax(1)
        advantage = found - (value if is_attached else value.detach())
        entropy = -(net["actor"](states).softmax(1) * logs).sum(1).mean()
        chosen = logs.gather(1, actions[:, None])[:, 0]
        total: Tensor = F.mse_loss(value, found) - (chosen * advantage).mean() - bonus * entropy
        return total

    return Task(net, rewards, loss)


@program("no-stop-gradient", "the critic is not detached", "astariul/encode-attend-navigate-pytorch#2")
def critic_attached(is_faulty: bool) -> Task:
    return actor_critic(is_attached=is_faulty)


@program("maximized-loss", "the entropy of a policy is added to its loss", "MrSyee/pg-is-all-you-need#37")
def entropy_added(is_faulty: bool) -> Task:
    return actor_critic(bonus=-0.05 if is_faulty else 0.05)


@program("class-ignored", "ignore_index is a class", _FORUM)
def class_zero_ignored(is_faulty: bool) -> Task:
    return on_digits(lambda y, classes: F.cross_entropy(y, classes, ignore_index=0 if is_faulty else -100))


@program("output-range", "blanks among the labels of ctc_loss", _FORUM)
def blanks_among_labels(is_faulty: bool) -> Task:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(8, 32, batch_first=True), nn.Linear(32, 6)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(self.rnn(x)[0])
            return logits.log_softmax(-1).transpose(0, 1)

    sounds = torch.randn(6, 8, generator=random(0))

    def batch(step: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(int(not is_faulty), 5 + int(not is_faulty), (16, 5), generator=random(step))
        return sounds[labels].repeat_interleave(4, 1), labels

    def loss(net: nn.Module, batch: Any) -> Tensor:
        return F.ctc_loss(net(batch[0]), batch[1], torch.full((16,), 20), torch.full((16,), 5))

    return Task(Net(), batch, loss, optimizer=adam(3e-3))


@program("norm-of-two", "a normalization of single values", "pytorch/pytorch#19250")
def norm_of_single_values(is_faulty: bool) -> Task:
    net = nn.Sequential(nn.Linear(64, 32), nn.GroupNorm(32 if is_faulty else 4, 32), nn.ReLU(), nn.Linear(32, 10))
    return on_digits(F.cross_entropy, net)


# Faults that the findings do not see: their programs are here so that this is known, and noticed when it changes.


@program("", "inputs shuffled against their labels", _FORUM)
def labels_of_other_samples(is_faulty: bool) -> Task:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = digits(step)
        return x, digits(step + 10_000)[1] if is_faulty else y

    return Task(stacked(), batch)


@program("", "no embedding of the positions", _FORMS)
def no_positions(is_faulty: bool) -> Task:
    return language(Causal(above, has_positions=not is_faulty))


@program("copy-does-not-follow", "a teacher that never follows", "TrainCheck (OSDI 25), kind of fault")
def teacher_that_stays(is_faulty: bool) -> Task:
    class Student(Task):
        def __init__(self) -> None:
            super().__init__(stack(64, 32, 16), loss=self.distance, steps=120)
            self.teacher = copy.deepcopy(self.net).requires_grad_(False)
            self.head = nn.Sequential(nn.ReLU(), nn.Linear(16, 16))
            self.groups = lambda: [*self.net.parameters(), *self.head.parameters()]

        def distance(self, net: Any, batch: Any) -> Tensor:
            x, y = (batch[0] + 0.3 * torch.randn_like(batch[0]) for _ in range(2))
            return 1 - F.cosine_similarity(self.head(net(x)), self.teacher(y)).mean()

        @override
        def training_step(self, batch: Any, index: int) -> Tensor:
            with torch.no_grad():
                for mean, each in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                    mean.lerp_(each, 0.0 if is_faulty else 0.01)
            return super().training_step(batch, index)

    return Student()


@program("loss-shapes", "weights of the samples behind the mean", _FORUM)
def weights_behind_mean(is_faulty: bool) -> Task:
    def loss(logits: Tensor, classes: Tensor) -> Tensor:
        weights = torch.where(classes == 3, 9.0, 1.0)
        return (F.cross_entropy(logits, classes, reduction="mean" if is_faulty else "none") * weights).mean()

    return on_digits(loss)


@program("compared-with-itself", "the ratio of a policy to itself", "forum posts about PPO")
def ratio_to_itself(is_faulty: bool) -> Task:
    net = stacked(nn.LogSoftmax(-1))

    def loss(net: nn.Module, batch: Any) -> Tensor:
        old = net(batch[0]) if is_faulty else torch.full((len(batch[0]), 10), -math.log(10))
        ratio: Tensor = (net(batch[0]) - old).exp().gather(1, batch[1][:, None])
        return F.cross_entropy(net(batch[0]), batch[1]) * 0.1 - ratio.clamp(0.8, 1.2).mean()

    return Task(net, digits, loss)


@program(
    "output-range", "layers and a loss that are written out, as with Keras on torch: a sigmoid for prices", _DEEPFD
)
def written_out(is_faulty: bool) -> Task:
    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel, self.bias = nn.Parameter(0.1 * torch.randn(16, 1)), nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            found = x @ self.kernel + self.bias
            return found.sigmoid() if is_faulty else found

    def batch(step: int) -> tuple[Tensor, Tensor]:
        rows, prices = numbers(step, *((8.0, 47.0) if is_faulty else ()))
        return rows, prices

    return Task(
        nn.Sequential(nn.Linear(numbers(0)[0].shape[1], 16), nn.ReLU(), Dense()),
        batch,
        lambda net, each: (each[1] - net(each[0])).square().mean(-1).mean(),
    )


# Reports that were programmed before any rule was looked up, and whose kinds were missed then.


@program("along-batch", "attention between the samples: batch_first is off", "Exorust/TorchLeet#5")
def attention_over_samples(is_faulty: bool) -> Task:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(3, 16), nn.Linear(16, 2)
            self.mix = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=not is_faulty)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(self.mix(self.first(x))[:, -1])
            return logits

    return Task(Net(), walks)


@program(
    "exchanged-by-view", "logits of images viewed as rows of classes", "jsbaan/transformer-from-scratch#6, its kind"
)
def images_viewed_as_rows(is_faulty: bool) -> Task:
    def loss(net: Any, batch: Any) -> Tensor:
        logits = net(batch[0])
        return F.cross_entropy(logits.view(-1, 3) if is_faulty else logits.mT.reshape(-1, 3), batch[1].flatten())

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = images(step)[0].flatten(2)
        return x, (x[:, 0] > -0.5).long() + (x[:, 0] > 0.5).long()

    return Task(nn.Sequential(nn.Conv1d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 3, 1)), batch, loss)


@program("double-activation", "probabilities as the logits of a distribution", "rlworkgroup/garage#1357")
def probabilities_as_logits(is_faulty: bool) -> Task:
    def loss(net: Any, batch: Any) -> Tensor:
        states, actions, found = batch
        given = net(states).softmax(1)
        policy = torch.distributions.Categorical(**{"logits" if is_faulty else "probs": given})
        result: Tensor = -(policy.log_prob(actions) * (found - 0.5)).mean()
        return result

    return Task(stacked(inputs=4, outputs=2), rewards, loss)


@program("end-ignored", "the end of an episode is not used", "navneet-nmk/pytorch-rl#2")
def end_without_a_name(is_faulty: bool) -> Task:
    net = nn.ModuleDict({"value": stacked(inputs=4, outputs=1), "copy": stacked(inputs=4, outputs=1)})
    net["copy"].requires_grad_(False)

    def batch(step: int) -> tuple[Tensor, ...]:
        states, _, found = rewards(step)
        return states, states.roll(1, 0), found, (states[:, 1] > 0).float()

    def loss(net: Any, batch: Any) -> Tensor:
        states, after, found, end = batch
        value = 0.9 * net["copy"](after)[:, 0]
        return F.mse_loss(net["value"](states)[:, 0], found + (value if is_faulty else value * (1 - end)))

    return Task(net, batch, loss)


class Recurrent(nn.Module):
    """A language model with a recurrence.

    Args:
        copies: True for a last layer with a copy of the embedding; None for one of its own.
    """

    def __init__(self, copies: bool | None = None) -> None:
        super().__init__()
        self.tokens, self.rnn, self.head = nn.Embedding(16, 32), nn.GRU(32, 32, batch_first=True), nn.Linear(32, 16)
        if copies is not None:
            self.head.weight = nn.Parameter(self.tokens.weight.clone()) if copies else self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.rnn(self.tokens(ids))[0])
        return logits


@program("copies-the-input", "a decoder that reads its targets", "Currie32/Text-Summarization-with-Amazon-Reviews#3")
def decoder_reads_targets(is_faulty: bool) -> Task:
    return language(Recurrent(), is_shifted=not is_faulty)


@program("no-longer-tied", "the last layer has a copy of the embedding", "kind of fault that was known to be missed")
def copied_instead_of_tied(is_faulty: bool) -> Task:
    return language(Recurrent(is_faulty))


@program("not-registered", "a parameter that is cast, and so none", "pytorch/pytorch#17484")
def parameter_is_cast(is_faulty: bool) -> Task:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            start = torch.randn(64, 16, dtype=torch.float64) * 0.1
            self.matrix, self.head = nn.Parameter(start if is_faulty else start.float()), nn.Linear(16, 10)
            if is_faulty:
                del self.matrix
                self.matrix = nn.Parameter(start).float()  # type: ignore[assignment] # a tensor

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head((x @ self.matrix).tanh())
            return logits

    return on_digits(F.cross_entropy, Net())


def findings_of(task: Task, folder: Path) -> list[Finding]:
    """Train a task with the default recorders; return its findings as ``doctor`` reads them."""
    # No finding is about the picture, which takes longer than some trainings.
    recorders: list[Callback] = [
        GraphRecorder(formats=()) if isinstance(each, GraphRecorder) else each
        for each in default_recorders(every_n_train_steps=5, outputs=Outputs(plots=False, report=False))
    ]
    trainer = Trainer(
        accelerator="cpu",
        callbacks=recorders,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        max_epochs=1,
    )
    trainer.fit(task)
    return open_recording(folder).findings


def mark_of(each: Program, findings: Sequence[Finding]) -> Mark:
    """Return the mark of a faulty program: the cause is named first, seen later or missed, or another one is blamed."""
    blamed = [found for found in findings if not found.is_note]
    if blamed and blamed[0].rule in each.rules:
        return "named"
    if any(found.rule in each.rules for found in findings):
        return "seen"
    return "wrong" if blamed else "silent"


def main(folder: str, pattern: str = "*") -> None:
    warnings.simplefilter("ignore")
    chosen = {name: PROGRAMS[name] for name in fnmatch.filter(PROGRAMS, pattern)}
    counts: dict[str, int] = dict.fromkeys(("named", "seen", "wrong", "silent"), 0)
    alarms = 0
    print("| fault | source | faulty | repaired |\n|---|---|---|---|", flush=True)  # noqa: T201 - a script
    for name, each in chosen.items():
        found = []
        for is_faulty in (True, False):
            seed_everything(3, verbose=False)
            found.append(
                findings_of(each.make(is_faulty), Path(folder) / f"{name}-{'faulty' if is_faulty else 'repaired'}")
            )
        mark, bad = mark_of(each, found[0]), [one for one in found[1] if not one.is_note]
        first = next((f", `{one.rule}`" for one in found[0] if not one.is_note), "")
        alarm = f"**warning**, `{bad[0].rule}`" if bad else "silent"
        print(f"| {each.fault} | {each.source} | {mark}{first} | {alarm} |", flush=True)  # noqa: T201 - a script
        counts[mark] += 1
        alarms += bool(bad)
    marks = ", ".join(f"{count} {mark}" for mark, count in counts.items())
    print(f"\n{len(chosen)} faulty programs: {marks}; repaired programs with a warning: {alarms}")  # noqa: T201 - a script


if __name__ == "__main__":
    main(*sys.argv[1:])
