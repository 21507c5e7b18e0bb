"""Compare adapters of every kind in one mixed batch with PEFT on a GPU.

    python -m tests.gpu.kinds_check

PEFT writes the adapters and computes the expected logits on the CPU in float32. The engine runs all
of them beside base rows, in float32 on graphs and on steps without one, and in bfloat16.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.lib.machine import describe_machine
from benchmarks.lib.report import Section, Table, parse_arguments, start_report
from loramux.config.engine import EngineConfig
from loramux.engine.build import build_engine, load_base
from loramux.engine.engine import Engine
from loramux.runner.device_choice import resolve_config
from loramux.types.request import Selection
from tests.engine_factory import make_prompt, make_request, run_all
from tests.kinds_factory import KINDS, greedy, kinds_of, load_kind, logits_of, make_kind
from tests.model_factory import save_hf_folder, tiny_transformers_model

SIZES = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024, "num_hidden_layers": 3}
NUM_TOKENS = 12
DIFFERENCE = "largest difference"
LIMITS = {"float32": 1e-4, "bfloat16": 0.25}
"""Difference of a logit relative to the largest one; random models amplify that of bfloat16."""


class Scene:
    def __init__(self, family: str, folder: Path) -> None:
        self.model = tiny_transformers_model(family, **SIZES)
        kinds = kinds_of(family)
        self.base = save_hf_folder(self.model, folder / "base")
        self.folders = {
            name: make_kind(name, self.model, folder / name, seed=number)
            for number, name in enumerate(kinds)
        }
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.logits: dict[str, torch.Tensor] = {}
        self.tokens: dict[str, list[int]] = {}
        for number, name in enumerate(["", *kinds]):
            size = SIZES["vocab_size"] + (KINDS[name].num_added_tokens if name else 0)
            self.prompts[name] = make_prompt(20 + number, seed=number, vocab_size=size)
            oracle = load_kind(name, self.model, self.folders[name]) if name else self.model
            self.logits[name] = logits_of(oracle, self.prompts[name])
            self.tokens[name] = greedy(oracle, self.prompts[name], NUM_TOKENS)

    def engine(self, dtype: str, device: str) -> tuple[Engine, dict[str, Selection]]:
        settings = EngineConfig(device=device, dtype=dtype, device_memory_bytes=512 * 2**20)
        config, _ = resolve_config(settings)
        engine = build_engine(load_base(self.base, config), config)
        selections: dict[str, Selection] = {"": ()}
        for name, folder in self.folders.items():
            selections[name] = ((engine.register_adapter(folder).cid, 1.0),)
        return engine, selections


def check_logits(scene: Scene, dtype: str, device: str) -> Table:
    engine, selections = scene.engine(dtype, device)
    prompts = [(scene.prompts[name], selection) for name, selection in selections.items()]
    table: Table = []
    for name, found in zip(selections, engine.prompt_logits(prompts), strict=True):
        expected = scene.logits[name]
        size = expected.shape[1]
        difference = (found[:, :size].float().cpu() - expected).abs().max() / expected.abs().max()
        table.append({"kind": name or "base", "dtype": dtype, DIFFERENCE: float(difference)})
        assert (found[:, size:] == -torch.inf).all(), f"{name} has logits of other tokens"
    engine.close()
    return table


def check_tokens(scene: Scene, device: str) -> Table:
    """Greedy tokens of a mixed batch; the second round runs on graphs captured in the first."""
    engine, selections = scene.engine("float32", device)
    table: Table = []
    for number in range(3):
        began = time.perf_counter()
        requests = [
            make_request(name or "base", scene.prompts[name], selection, max_tokens=NUM_TOKENS)
            for name, selection in selections.items()
        ]
        answers = run_all(engine, requests)
        wrong = [name for name in selections if answers[name or "base"] != scene.tokens[name]]
        seconds = time.perf_counter() - began
        table.append(
            {"round": number, "requests": len(requests), "differ": len(wrong), "s": seconds}
        )
        print(f"round {number}: {len(wrong)} differ {wrong}, {seconds:.1f} s", flush=True)
        while engine.prepare_next():
            pass
    engine.close()
    return table


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default="llama31,gemma2")
    parser.add_argument("--device", default="cuda")
    arguments = parse_arguments(parser, words)
    machine = describe_machine("float32, bfloat16", arguments.device)
    report = start_report("check-kinds", arguments, machine)
    warnings.simplefilter("ignore")
    failed = []
    for family in arguments.families.split(","):
        with tempfile.TemporaryDirectory() as folder:
            scene = Scene(family, Path(folder))
            rows: Table = []
            for dtype in LIMITS:
                rows += check_logits(scene, dtype, arguments.device)
            report.add(Section(title=f"Logits of {family}", rows=rows))
            failed += [row for row in rows if row[DIFFERENCE] > LIMITS[row["dtype"]]]
            tokens = check_tokens(scene, arguments.device)
            report.add(Section(title=f"Greedy tokens of {family}", rows=tokens))
            failed += [row for row in tokens if row["differ"]]
    report.finish()
    for row in failed:
        print(f"WRONG: {row}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
