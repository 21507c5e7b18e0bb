"""Adapters of every kind in one batch with base rows, against PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loramux.engine.engine import Engine
from loramux.types.request import Selection
from tests.engine_factory import make_engine, make_prompt, make_request, run_all
from tests.kinds_factory import KINDS, greedy, load_kind, logits_of, make_kind
from tests.model_factory import tiny_transformers_model

# Biases, tied embeddings, norms of weight + 1 with sandwich norms and scaled embeddings.
FAMILIES = {"llama": {}, "llama31": {}, "smollm2": {"hidden_size": 48}, "gemma2": {}}
NUM_TOKENS = 6
Cases = dict[str, tuple[tuple[int, ...], Any]]


class Scene:
    """A tiny model with one adapter of each kind, and PEFT's models of them."""

    def __init__(self, family: str, folder: Path, kinds: list[str]) -> None:
        self.model = tiny_transformers_model(family, num_hidden_layers=2, **FAMILIES[family])
        self.folders = {
            name: make_kind(name, self.model, folder / name, seed=number)
            for number, name in enumerate(kinds)
        }
        self.oracles = {
            name: load_kind(name, self.model, path) for name, path in self.folders.items()
        }
        self.prompts = {
            name: make_prompt(5 + number % 4, seed=number, vocab_size=self.vocab_size(name))
            for number, name in enumerate(["", *kinds])
        }

    def vocab_size(self, name: str) -> int:
        size: int = self.model.config.vocab_size
        return size + (KINDS[name].num_added_tokens if name else 0)

    def oracle(self, name: str) -> Any:
        return self.oracles[name] if name else self.model


def kinds_of(family: str) -> list[str]:
    """Kinds that PEFT applies to the model; it refuses some with tied embeddings."""
    return [name for name in KINDS if (family, name) not in NOT_SAVED]


NOT_SAVED: set[tuple[str, str]] = set()


@pytest.fixture(scope="module", params=FAMILIES)
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    family: str = request.param
    return Scene(family, tmp_path_factory.mktemp("kinds"), kinds_of(family))


def selections_of(engine: Engine, scene: Scene) -> dict[str, Selection]:
    found: dict[str, Selection] = {"": ()}
    for name, folder in scene.folders.items():
        found[name] = ((engine.register_adapter(folder).cid, 1.0),)
    return found


def check_logits(engine: Engine, scene: Scene) -> None:
    selections = selections_of(engine, scene)
    batch = [(scene.prompts[name], selection) for name, selection in selections.items()]
    for name, logits in zip(selections, engine.prompt_logits(batch), strict=True):
        expected = logits_of(scene.oracle(name), scene.prompts[name])
        size = expected.shape[1]
        torch.testing.assert_close(
            logits[:, :size], expected, atol=1e-4, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert (logits[:, size:] == -torch.inf).all(), name
    engine.check_integrity()


def check_greedy(engine: Engine, scene: Scene) -> None:
    selections = selections_of(engine, scene)
    requests = [
        make_request(name or "base", scene.prompts[name], selection, max_tokens=NUM_TOKENS)
        for name, selection in selections.items()
    ]
    answers = run_all(engine, requests)
    for name in selections:
        expected = greedy(scene.oracle(name), scene.prompts[name], NUM_TOKENS)
        assert answers[name or "base"] == expected, name


@pytest.mark.parametrize("kernels", ["torch", "cpu", "numba"])
def test_all_kinds_in_one_batch_equal_peft(
    kernels: str, scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "numba":
        pytest.importorskip("numba")
        monkeypatch.delenv("LORAMUX_KERNELS", raising=False)
    else:
        monkeypatch.setenv("LORAMUX_KERNELS", kernels)
    engine = make_engine(scene.model, tmp_path, device_memory_bytes=32 * 2**20)
    check_logits(engine, scene)
    check_greedy(engine, scene)
