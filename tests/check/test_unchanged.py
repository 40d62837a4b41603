"""A training is equal to the bit with a check before it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recorder import Check
from tests.check.healthy import warmup
from tests.check.programs import (
    COUNT,
    Function,
    Lit,
    Program,
    cnn,
    contrastive,
    denoise,
    detection,
    diffusion,
    gan,
    integers,
    language,
    loader,
    mlp,
    normal,
    reinforcement,
    seq2seq,
    sgd,
    tabular,
    vae,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # few workers, and the schedulers of Lightning


class Stateful(Lit):
    """A model that counts its steps, keeps its losses, and draws numbers of all generators."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(8, 4)), lambda net, batch: F.cross_entropy(net(batch[0]), batch[1]))
        self.count, self.seen = 0, [0.0]
        self.generator = torch.Generator().manual_seed(3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch[0].add_(1.0)  # in place
        self.count += 1
        noise = torch.rand((), generator=self.generator) + random.random() + float(np.random.rand())  # noqa: NPY002 - the global generator
        loss = super().training_step(batch, batch_idx) * (1 + 0.1 * noise)
        self.seen.append(float(loss))
        return loss


def initialized(optimizer: type[torch.optim.Optimizer]) -> Callable[[nn.Module], Any]:
    return lambda net: optimizer(net.parameters(), lr=0.01)  # type: ignore[call-arg]  # of each optimizer


def with_workers() -> Program:
    program = cnn()
    program.loader = loader(
        normal(COUNT, 3, 8, 8), integers(4, COUNT), shuffle=True, num_workers=1, persistent_workers=True
    )
    return program


def shuffled() -> Program:
    program = mlp()
    generator = torch.Generator().manual_seed(7)
    program.loader = loader(normal(COUNT, 8), integers(4, COUNT), shuffle=True, generator=generator)
    return program


def with_options(program: Program, **options: Any) -> Program:
    program.options = options
    return program


def spectral() -> Program:
    norm = torch.nn.utils.parametrizations.spectral_norm
    return mlp(net=nn.Sequential(norm(nn.Linear(8, 16)), nn.ReLU(), nn.Linear(16, 4)))


PROGRAMS: dict[str, Callable[[], Program]] = {
    "mlp": mlp,
    "dropout and batch norm": cnn,
    "scheduler": warmup,
    "accumulation": lambda: with_options(cnn(), accumulate_grad_batches=2),
    "bfloat16": lambda: with_options(cnn(), precision="bf16-mixed"),
    "clipping": lambda: with_options(language(), gradient_clip_val=0.1),
    "float64": lambda: with_options(mlp(), precision="64-true"),
    "no sanity check": lambda: with_options(tabular(), num_sanity_val_steps=0),
    "workers": with_workers,
    "shuffled": shuffled,
    "state": lambda: Program(Stateful(), loader(normal(COUNT, 8), integers(4, COUNT))),
    "momentum": lambda: mlp(optimizer=sgd(0.1, momentum=0.9, nesterov=True)),
    "adagrad": lambda: mlp(optimizer=initialized(torch.optim.Adagrad)),
    "rmsprop": lambda: mlp(optimizer=initialized(torch.optim.RMSprop)),
    "lbfgs": lambda: mlp(optimizer=initialized(torch.optim.LBFGS)),
    "spectral norm": spectral,
    "gan": gan,
    "vae": vae,
    "diffusion": lambda: diffusion(denoise),
    "contrastive": contrastive,
    "detection": detection,
    "seq2seq": seq2seq,
    "q learning": reinforcement,
    "lstm": lambda: Program(
        Lit(
            Function(
                lambda self, x: self.rnn(x)[0][:, -1], rnn=nn.LSTM(6, 3, dropout=0.2, num_layers=2, batch_first=True)
            ),
            lambda net, batch: F.cross_entropy(net(batch[0]), batch[1]),
        ),
        loader(normal(COUNT, 10, 6), integers(3, COUNT)),
    ),
}


def outcome(program: Program, folder: Path, callbacks: list[Callback]) -> dict[str, Any]:
    """Train for two epochs and return everything that a check might have changed."""
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }
    options |= {"max_epochs": 2, "enable_model_summary": False, "default_root_dir": folder, **program.options}
    trainer = Trainer(callbacks=callbacks, **options)
    trainer.fit(program.model, program.loader, program.validation)
    model: Any = program.model
    return {
        "weights": model.state_dict(),
        "optimizers": [each.state_dict() for each in trainer.optimizers],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False)["state"]["key"],  # noqa: NPY002 - the global generator
        "modes": [each.training for each in model.modules()],
        "attributes": {name: getattr(model, name) for name in ("count", "seen") if hasattr(model, name)},
        "names": dict.fromkeys(vars(model), 0),
        "hooks": [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules()],
        "metrics": dict(trainer.callback_metrics),
        "steps": trainer.global_step,
    }


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_training_is_the_same_after_a_check(name: str, tmp_path: Path) -> None:
    """Weights, optimizer states, random numbers, metrics and attributes are equal to the bit."""
    found = []
    each = Check(strict=True)
    for callbacks in ([], [each]):
        seed_everything(3, verbose=False)
        found.append(outcome(PROGRAMS[name](), tmp_path, [*callbacks]))
    assert each.result is not None
    assert sum(answer.verdict != "no answer" for answer in each.result.answers) >= 5, each.result.text()
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0, equal_nan=True)
