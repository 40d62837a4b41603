"""Fits with frozen parts and copies: what is found, and that nothing is changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from tests.insight.corpus.exam import findings_of
from tests.insight.corpus.healthy import stack
from tests.insight.corpus.task import Task, adam, digits, images, random


def convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for channels in (1, 16, 16, 16):
        layers += [nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten())


class Rows(nn.Module):
    """A transformer that gets an image as eight rows."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.rows, self.norm = nn.Linear(8, 32), nn.LayerNorm(32)

    @override
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(self.body(self.rows(x.view(-1, 8, 8)))).flatten(1)
        return found


pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning warns about copies in evaluation mode

BODIES: dict[str, tuple[Callable[[], nn.Module], int]] = {"cnn": (convolutions, 64), "transformer": (Rows, 256)}


def pretrained(name: str) -> nn.Module:
    make, width = BODIES[name]
    net = nn.Sequential(make(), nn.Linear(width, 10))
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    for step in range(40):
        x, classes = images(50_000 + step)
        optimizer.zero_grad()
        F.cross_entropy(net(x), classes).backward()
        optimizer.step()
    return net[0]


def warnings_of(task: Task, folder: Path) -> list[tuple[str, str]]:
    return [(each.rule, each.module) for each in findings_of(task, folder) if not each.is_note]


@pytest.mark.parametrize("prefix", ["module.", ""])
@pytest.mark.parametrize("name", BODIES)
def test_weights_with_a_wrong_prefix(name: str, prefix: str, tmp_path: Path) -> None:
    """A frozen body whose weights were not loaded is a finding, and the loaded one is none."""
    seed_everything(3, verbose=False)
    saved = {f"{prefix}{key}": value for key, value in pretrained(name).state_dict().items()}
    make, width = BODIES[name]
    body = make()
    body.load_state_dict(saved, strict=False)
    net = nn.Sequential(body.requires_grad_(False).eval(), nn.Linear(width, 10))
    found = warnings_of(Task(net, images, optimizer=adam(3e-3)), tmp_path)
    assert [rule for rule, _ in found] == ["never-trained"] * bool(prefix)


@pytest.mark.parametrize("is_frozen", [True, False])
@pytest.mark.parametrize("name", BODIES)
def test_a_frozen_new_head(name: str, is_frozen: bool, tmp_path: Path) -> None:
    """A new head that is frozen is a finding, although the body is trained."""
    seed_everything(3, verbose=False)
    make, width = BODIES[name]
    net = nn.Sequential(make(), nn.Linear(width, 10).requires_grad_(not is_frozen))
    found = warnings_of(Task(net, images), tmp_path)
    assert found == [("frozen", "net.1")] * is_frozen


class Followed(Task):
    """A task whose loss uses a copy of the net, which ``follow`` updates after each step."""

    def __init__(
        self,
        net: nn.Module,
        batch: Callable[[int], Any],
        loss: Callable[[Any, Any], Tensor],
        follow: Callable[[Any], object] | None,
    ) -> None:
        super().__init__(net, batch, lambda net, batch: loss(self, batch))
        self.head, self.follow = nn.Linear(16, 16) if loss is of_views else nn.Identity(), follow
        self.target = copy.deepcopy(net).requires_grad_(False)
        self.groups = lambda: [*self.net.parameters(), *self.head.parameters()]

    @override
    def on_train_batch_end(self, *arguments: Any) -> None:
        if self.follow is not None:
            self.follow(self)


def of_views(task: Any, batch: Any) -> Tensor:
    one, other = (batch[0] + 0.3 * torch.randn_like(batch[0]) for _ in range(2))
    return 1 - F.cosine_similarity(task.head(task.net(one)), task.target(other)).mean()


def of_values(task: Any, batch: Any) -> Tensor:
    states, actions, rewards, after = batch
    with torch.no_grad():
        value = rewards + 0.9 * task.target(after).max(1).values
    return F.smooth_l1_loss(task.net(states).gather(1, actions[:, None])[:, 0], value)


def transitions(step: int) -> tuple[Tensor, ...]:
    states, after = torch.randn(2, 64, 4, generator=random(step))
    actions = torch.randint(2, (64,), generator=random(step + 1))
    return states, actions, ((states[:, 0] > 0) == (actions == 1)).float(), after


def average(factor: float, *, of_buffers: bool = True) -> Callable[[Any], None]:
    def follow(task: Any) -> None:
        for one, other in zip(task.target.parameters(), task.net.parameters(), strict=True):
            one.data.copy_((1 - factor) * one.data + factor * other.data)
        for one, other in zip(task.target.buffers(), task.net.buffers(), strict=True):
            if of_buffers:
                one.copy_(other)

    return follow


TASKS: dict[str, Callable[[Any], Followed]] = {
    "teacher": lambda follow: Followed(stack(64, 64, 64, 16), digits, of_views, follow),
    "convolutions": lambda follow: Followed(nn.Sequential(convolutions(), nn.Linear(64, 16)), images, of_views, follow),
    "q-learning": lambda follow: Followed(stack(4, 64, 64, 2), transitions, of_values, follow),
}


@pytest.mark.parametrize(
    ("name", "follow", "rules"),
    [
        ("teacher", None, ["copy-stays"]),
        ("teacher", average(0.01), []),
        ("teacher", average(0.99), ["copy-without-lag"]),
        ("convolutions", None, ["copy-stays"]),
        ("convolutions", average(0.05), []),
        ("convolutions", average(0.05, of_buffers=False), ["copy-statistics-stay"]),
        ("q-learning", None, []),
        ("q-learning", average(0.005), []),
        ("q-learning", average(0.995), ["copy-without-lag"]),
    ],
)
def test_copies(name: str, follow: Callable[[Any], None] | None, rules: list[str], tmp_path: Path) -> None:
    """A teacher that never follows, and any copy that follows at once, is a finding; a target of values may stay."""
    seed_everything(3, verbose=False)
    task = TASKS[name](follow)
    task.target.eval()
    assert [rule for rule, _ in warnings_of(task, tmp_path)] == rules


def test_training_with_a_copy_is_not_changed(tmp_path: Path) -> None:
    """The losses and all tensors are those of a fit without recorders, to the bit."""
    ends = []
    for is_recorded in (True, False):
        seed_everything(3, verbose=False)
        task = TASKS["convolutions"](average(0.05))
        if is_recorded:
            findings_of(task, tmp_path)
        else:
            Trainer(
                accelerator="cpu",
                default_root_dir=tmp_path / "bare",
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                limit_val_batches=0,
                max_epochs=1,
            ).fit(task)
        ends.append((task.losses, task.state_dict()))
    (losses, state), (bare_losses, bare_state) = ends
    assert losses == bare_losses
    assert all(torch.equal(value, bare_state[name]) for name, value in state.items())
