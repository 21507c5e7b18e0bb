"""Forwards that are replayed: the same outputs with other inputs, adapters and weights.

On a CPU a replay calls the captured forward with the inputs and tables of the graph.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="needs Triton")

from loramux.diffusion.adapter import LowRank
from loramux.diffusion.forward_graphs import ForwardGraphs
from loramux.diffusion.rows import RowLora

WIDTH = 16
ROWS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, extra: dict[str, Tensor], scale: float = 1.0) -> list[Tensor]:
        hidden = self.first(x) * scale + extra["shift"]
        return [self.second(hidden), hidden]


def adapter(seed: int, *paths: str, rank: int = 4) -> dict[str, LowRank]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.1

    return {path: LowRank(normal(rank, WIDTH), normal(WIDTH, rank)) for path in paths}


class Scene:
    def __init__(self, monkeypatch) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.plain = RowLora(self.net)
        monkeypatch.setenv("LORAMUX_KERNELS", "triton")
        self.other = Net()
        self.other.load_state_dict(self.net.state_dict())
        self.lora = RowLora(self.other)
        assert self.lora.tables is not None
        self.graphs = ForwardGraphs(self.other, self.lora.tables)
        self.number = 0

    def add(self, cid: str, modules: dict[str, LowRank]) -> None:
        self.plain.add(cid, modules)
        self.lora.add(cid, modules)

    def step(self, *selections, rows: int = 2, scale: float = 1.0) -> list[Tensor]:
        """Run one forward of random inputs; return its outputs after a comparison."""
        self.number += 1
        generator = torch.Generator().manual_seed(self.number)
        x = torch.randn(rows, 5, WIDTH, generator=generator)
        extra = {"shift": torch.randn(WIDTH, generator=generator)}
        self.plain.set_rows(selections)
        self.lora.set_rows(selections)
        expected = self.net(x, extra=extra, scale=scale)
        with self.graphs.replaying():
            found = self.other(x, extra=extra, scale=scale)
        for one, two in zip(found, expected, strict=True):
            assert torch.allclose(one, two, atol=1e-5, rtol=0)
        return found


@pytest.fixture
def scene(monkeypatch):
    return Scene(monkeypatch)


def test_a_graph_takes_other_inputs_adapters_and_weights(scene):
    for cid in ("a", "b"):
        scene.add(cid, adapter(ord(cid), "first", "second"))
    for _ in range(4):
        scene.step((("a", 1.0),), (("b", 0.5),))
    assert scene.graphs.num_replays == 1
    kept = scene.step((("b", -1.0),), (("a", 2.0),))
    copies = [one.clone() for one in kept]
    # An adapter that came after the capture, and the base in one row.
    scene.add("c", adapter(7, "first", "second", rank=3))
    scene.plain.remove("a")
    scene.lora.remove("a")
    scene.step((("c", 1.0),), ())
    scene.step((("b", 1.0),), (("b", 0.1),))
    assert scene.graphs.num_replays >= 3
    assert all(torch.equal(one, two) for one, two in zip(kept, copies, strict=True))


def test_what_changes_the_launches_gets_a_graph_of_its_own(scene):
    scene.add("a", adapter(1, "first"))
    scene.add("wide", adapter(2, "first", "second", rank=70))
    for _ in range(4):
        scene.step((), ())
    assert scene.graphs.num_replays == 1
    for _ in range(4):
        scene.step((("a", 1.0),), ())
    assert scene.graphs.num_replays == 2
    scene.step((("wide", 1.0),), ())
    scene.step((("a", 1.0), ("wide", 0.5)), ())
    scene.step((("a", 1.0),), (), scale=2.0)
    scene.step((("a", 1.0),), (), (), rows=ROWS)
    assert scene.graphs.num_replays == 2
    scene.step((("a", 0.25),), ())
    assert scene.graphs.num_replays == 3


def test_a_forward_that_cannot_be_captured_runs_without_a_graph(scene, monkeypatch, caplog):
    def refuse(work):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr("loramux.memory.device.GraphMaker.make", lambda self, work: refuse(work))
    scene.add("a", adapter(1, "first"))
    for _ in range(6):
        scene.step((("a", 1.0),), ())
    assert scene.graphs.num_replays == 0
    assert caplog.text.count("without a CUDA graph") == 1
