"""Tests of loops of Fabric, with a monitor and with a callback for `fabric.call`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn import functional as F

from lightning_recorder import Monitor
from lightning_recorder.loops import FabricCallback
from lightning_recorder.testing import assert_same
from tests.loops.test_monitor import loader, new, same_bits, watched


def _train(folder: Path, way: str) -> nn.Module:
    options: dict[str, Any] = {"log_dir": folder, "every_n_train_steps": 1}
    callbacks: list[Any] = [FabricCallback(**options)] if way == "callback" else []
    fabric = Fabric(accelerator="cpu", devices=1, callbacks=callbacks)
    made = new()
    torch.manual_seed(2)
    net, optimizer = fabric.setup(made, torch.optim.AdamW(made.parameters(), 1e-2))
    monitor = Monitor(net, optimizer, **options) if way == "monitor" else None
    for index, batch in enumerate(loader()):
        step = None if monitor is None else monitor.step(batch)
        if step is not None:
            step.__enter__()
        fabric.call("on_train_batch_start", batch, index)
        loss = F.cross_entropy(net(batch[0]), batch[1])
        fabric.call("on_before_backward", loss)
        if monitor is None:
            fabric.backward(loss)
        else:
            monitor.backward(loss, fabric.backward)
        optimizer.step()
        optimizer.zero_grad()
        fabric.call("on_train_batch_end", loss, batch, index)
        if step is not None:
            step.__exit__(None, None, None)
    fabric.call("on_train_end")
    if monitor is not None:
        monitor.close()
    return made


@pytest.mark.parametrize("way", ["monitor", "callback"])
def test_a_loop_of_fabric_is_recorded(tmp_path: Path, way: str) -> None:
    """Bits stay, names are those of the model, and the records are those of a loop without Fabric."""
    plain = _train(tmp_path / "none", "")
    assert same_bits(plain, _train(tmp_path / way, way))
    net = new()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    with Monitor(net, optimizer, log_dir=tmp_path / "loop", every_n_train_steps=1) as monitor:
        for batch in loader():
            with monitor.step(batch):
                loss = F.cross_entropy(net(batch[0]), batch[1])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                monitor.log(loss=loss)
    assert_same(tmp_path / way, tmp_path / "loop", exact=True)
    assert watched(tmp_path / way, "loss") == watched(tmp_path / "loop", "loss")
