"""Compare rows beside adapters that overflow with rows beside harmless ones, bit by bit.

    python -m tests.gpu.numeric_check [--shapes small,llama-3.1-8b] [--dtypes bfloat16]

Engines differ in the weights of one adapter alone: harmless, 1e18, overflow in scores, in hidden
states or in activations, denormal. Steps of up to 500 rows run as decode graphs and prefill graphs,
with augmented weights and on the segmented path, and without a graph. The logits of all rows with
another adapter or with none must have the same bits, and the rows whose logits are not finite must
be those that fail. Free KV pages hold NaN. At last requests run through the engine: those of the
adapter end with the error `numeric`, which names it. It exits with 1 if anything differs.

It needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count as numbers_from
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.lib.machine import describe_machine
from benchmarks.lib.random_weights import PROJECTIONS, SHAPES, random_model
from benchmarks.lib.report import Section, Table, names, parse_arguments, start_report
from loramux.adapters.peft.unbound import read_without_base
from loramux.config.engine import EngineConfig
from loramux.engine.build import build_engine
from loramux.engine.engine import Engine
from loramux.models.architectures import base_info
from loramux.models.loader import LoadedModel
from loramux.runner.device_choice import resolve_config
from loramux.runner.gpu_runner import GpuRunner
from loramux.types.composition import compose
from loramux.types.request import Selection
from loramux.types.sampling import SamplingParams
from loramux.types.step import Chunk, SampleRow, StepPlan, StepResult
from tests.chunk_factory import make_chunk
from tests.gpu.engine_check import request

ALL = PROJECTIONS["all"]
HARMLESS = (0.02, 0.02)
# The largest delta of one rank that is not refused at load is 1.8e19.
VARIANTS: dict[str, dict[str, tuple[float, float]]] = {
    "harmless": {},
    "1e18": dict.fromkeys(ALL, (1.0, 1e18)),
    "scores": dict.fromkeys(("q_proj", "k_proj"), (1.0, 1.5e19)),
    "hidden states": dict.fromkeys(("o_proj", "down_proj"), (1.0, 1.5e19)),
    "activations": dict.fromkeys(("gate_proj", "up_proj"), (1.0, 1.5e19)),
    "denormal A": dict.fromkeys(ALL, (1e-39, 1.0)),
    "denormal B": dict.fromkeys(ALL, (1.0, 1e-39)),
}
"""Largest values of A and B by projection; HARMLESS elsewhere."""
OVERFLOWS = ("1e18", "hidden states")
"""Variants of which every row must fail (not in float16); of the others some may."""
FLOAT16_MOST = 3e4
RANK = 16
GOOD_RANKS = (8, 16, 64, *(4, 24, 16, 40) * 6)
"""The first two are few enough for augmented weights beside the changed adapter."""
NUM_HOT = 2
PROMPTS = (1, 5, 9, 40, 17, 64, 3, 128)
CONTEXTS = (1, 3, 17, 40, 16)
DECODES = (1, 4, 16, 32, 64, 192, 256, 500)
MAX_TOKENS = 512
COUNTS = ("steps", "rows of others", "differ", "failed", "wrong failures")
Digest = tuple[int, bool]
"""A hash of the bits of a row of logits, and whether the row has a token."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of a check; the defaults are for a GPU."""

    shape: dict[str, Any]
    dtype: str
    decodes: tuple[int, ...] = DECODES
    num_prefill_rows: int = 500
    num_requests: int = 60
    good_ranks: tuple[int, ...] = GOOD_RANKS
    pool_bytes: int = 2**31
    variants: tuple[str, ...] = tuple(VARIANTS)

    def model(self) -> LoadedModel:
        dtype = getattr(torch, self.dtype)
        return random_model(self.shape, dtype, std=0.04, device="cuda")


def write_adapter(
    folder: Path, model: LoadedModel, rank: int, largest: dict[str, tuple[float, float]], seed: int
) -> Path:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for target in base_info(model.config, model.name).targets:
        name = target.path.rsplit(".", 1)[1]
        shapes = ("A", (rank, target.in_features)), ("B", (target.out_features, rank))
        for (side, shape), most in zip(shapes, largest.get(name, HARMLESS), strict=True):
            noise = torch.randn(shape, generator=generator).double()
            if model.decoder.norm.weight.dtype == torch.float16:
                most = min(most, FLOAT16_MOST)
            weight = (noise / noise.abs().max() * most).bfloat16()
            tensors[f"base_model.model.{target.path}.lora_{side}.weight"] = weight
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "base_model_name_or_path": model.name,
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(ALL),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def write_adapters(folder: Path, scale: Scale) -> tuple[list[Path], dict[str, Path]]:
    """Write the adapters that stay the same, and the variants of the changed one."""
    model = scale.model()
    good = [
        write_adapter(folder / f"good{number}", model, rank, {}, seed=number)
        for number, rank in enumerate(scale.good_ranks)
    ]
    first = min(cid_of(path) for path in good)
    return good, {
        name: _first_variant(folder / name, model, VARIANTS[name], first) for name in scale.variants
    }


def _first_variant(
    folder: Path, model: LoadedModel, largest: dict[str, tuple[float, float]], first: str
) -> Path:
    """Write a variant whose CID sorts before `first`, so that sums have one order in all variants.

    Rows are placed by the order of their selections.
    """
    write_adapter(folder, model, RANK, largest, seed=1000)
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    for number in numbers_from():
        if cid_of(folder) < first:
            break
        save_file(tensors, weights, metadata={"format": "pt", "number": str(number)})
    return folder


def cid_of(folder: Path) -> str:
    return read_without_base(folder).cid


@dataclass(frozen=True, slots=True)
class World:
    """An engine with the adapters of one variant on the device, always in the same slots."""

    engine: Engine
    runner: GpuRunner
    changed: str
    good: tuple[str, ...]

    @property
    def hot(self) -> list[Selection]:
        first, second = ((cid, 1.0) for cid in self.good[:NUM_HOT])
        return [((self.changed, 1.0),), (first,), (), (second,)]

    @property
    def mixed(self) -> list[Selection]:
        bad = (self.changed, 1.0)
        plain: list[Selection] = [((cid, 1.0),) for cid in self.good]
        summed = [compose(((a, 0.5), (b, 1.5))) for a, b in pairwise(self.good)]
        found: list[Selection] = []
        for number, (one, sum_of) in enumerate(zip(plain, [*summed, ()], strict=True)):
            found += [(bad,), one, sum_of, ()]
            if number % 4 == 0:
                found.append(compose((bad, *one)))
        return found


def build_world(scale: Scale, changed: Path, good: Sequence[Path]) -> World:
    config, _ = resolve_config(
        EngineConfig(
            device="cuda",
            dtype=scale.dtype,
            device_memory_bytes=scale.pool_bytes,
            max_sequences=MAX_TOKENS,
            max_batch_tokens=MAX_TOKENS,
            max_model_len=512,
        )
    )
    engine = build_engine(scale.model(), config)
    cids = [engine.register_adapter(folder).cid for folder in (changed, *good)]
    for cid in cids:
        assert engine.residency.load_now([cid]), "the adapters do not fit"
    assert isinstance(engine.executor, GpuRunner)
    return World(engine, engine.executor, cids[0], tuple(cids[1:]))


class Steps:
    """Runs the same steps on a world of any variant, and keeps what they returned."""

    def __init__(self, world: World, scale: Scale) -> None:
        self._world = world
        self._scale = scale
        self._pages = self._free_pages()
        self.digests: dict[str, dict[int, list[Digest]]] = {}
        """By step and sequence; without a graph of all tokens, else of the last."""
        self.failed: dict[str, set[int]] = {}
        self.selections: dict[str, dict[int, Selection]] = {}

    def _free_pages(self) -> list[int]:
        pages = self._world.engine.pages
        found = pages.allocate(("kv", 0), pages.num_free)
        assert found is not None
        self._world.engine.executor.kv_pages[found] = torch.nan
        return sorted(found)

    def run(self) -> None:
        world, scale = self._world, self._scale
        for kind, selections in (("hot", world.hot), ("mixed", world.mixed)):
            self._prefill(f"prefill, {kind}", selections, scale.num_prefill_rows)
            for count in scale.decodes:
                self._decode(f"decode {count}, {kind}", selections, count)
        # On the pages, and over the scratch memory, of rows that have overflowed.
        self._prefill("prefill afterwards", world.hot[1:], scale.num_prefill_rows)
        self._decode("decode afterwards", world.hot[1:], scale.decodes[-1])

    def _chunk(self, number: int, start: int, length: int, selection: Selection) -> Chunk:
        block = self._world.engine.executor.kv.block_tokens
        per_sequence = -(-(max(*PROMPTS, *CONTEXTS) + 1) // block)
        pages = self._pages[number * per_sequence : (number + 1) * per_sequence]
        assert len(pages) == per_sequence, "the pool is too small"
        vocab = self._scale.shape["vocab_size"]
        tokens = tuple((7 * number + 13 * at + 3) % vocab for at in range(start, start + length))
        params = SamplingParams(temperature=0.0 if number % 2 else 0.8)
        sample = SampleRow(params, number, (5,), (9,))
        return make_chunk(number, tokens, start, pages, selection, sample)

    def _prefill(self, name: str, selections: Sequence[Selection], num_rows: int) -> None:
        chunks: list[Chunk] = []
        for number, (length, selection) in enumerate(zip(cycle(PROMPTS), cycle(selections))):
            length = min(length, num_rows)
            chunks.append(self._chunk(number, 0, length, selection))
            num_rows -= length
            if num_rows == 0:
                break
        self._step(name, StepPlan(tuple(chunks)))

    def _decode(self, name: str, selections: Sequence[Selection], count: int) -> None:
        rows = list(enumerate(islice(zip(cycle(CONTEXTS), cycle(selections)), count)))
        for start in range(0, count, MAX_TOKENS // max(CONTEXTS)):
            some = rows[start : start + MAX_TOKENS // max(CONTEXTS)]
            plan = StepPlan(tuple(self._chunk(i, 0, length, s) for i, (length, s) in some))
            self._world.runner.run(plan)
        chunks = [self._chunk(i, length, 1, selection) for i, (length, selection) in rows]
        self._step(name, StepPlan(tuple(chunks)))

    def _step(self, name: str, plan: StepPlan) -> None:
        runner = self._world.runner
        with recorded_logits(runner) as seen:
            # Augmented weights take an adapter that consecutive steps need.
            for _ in range(3):
                result = runner.run(plan)
        # Large models have no graphs of large prefill steps.
        if seen:
            path, logits = seen[-1]
            of_graph = dict(zip(result.accepted, logits.unsqueeze(1), strict=True))
            self._keep(f"{name}: {path}", plan, result, of_graph)
        found = runner.logits(plan)
        with torch.inference_mode():
            result = runner._launch_in_parts(plan, None).result()
        self._keep(f"{name}: no graph", plan, result, found)

    def _keep(
        self, name: str, plan: StepPlan, result: StepResult, logits: dict[int, Tensor]
    ) -> None:
        self.digests[name] = {number: digests(rows) for number, rows in logits.items()}
        self.failed[name] = set(result.failed)
        self.selections[name] = {chunk.sequence_id: chunk.selection for chunk in plan.chunks}


def digests(logits: Tensor) -> list[Digest]:
    """logits [rows, vocab]"""
    bits = logits.contiguous().view(torch.int16 if logits.itemsize == 2 else torch.int32)
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (logits.shape[1],), generator=generator)
    hashes = (bits.long() * factors.to(logits.device)).sum(1)
    has_token = logits.float().amax(1).isfinite()
    return list(zip(hashes.tolist(), has_token.tolist(), strict=True))


@contextmanager
def recorded_logits(runner: GpuRunner) -> Iterator[list[tuple[str, Tensor]]]:
    """Record the logits of steps that run as a graph, with the graph's path."""
    seen: list[tuple[str, Tensor]] = []
    kinds: dict[str, Any] = {
        "decode graph": runner.decode_graphs,
        "prefill graph": runner.prefill_graphs,
    }
    for name, graphs in kinds.items():
        graphs.launch = _recorded(name, graphs, seen)
    try:
        yield seen
    finally:
        for graphs in kinds.values():
            del graphs.launch


def _recorded(name: str, graphs: Any, seen: list[tuple[str, Tensor]]) -> Any:
    launch, fill, modes = graphs.launch, graphs.lora.fill, [""]

    def filled(*arguments: Any) -> Any:
        mode = fill(*arguments)
        modes[0] = str(mode)
        return mode

    def launched(*arguments: Any) -> Any:
        graphs.lora.fill = filled
        try:
            logits = launch(*arguments)
        finally:
            del graphs.lora.fill
        if logits is not None:
            seen.append((f"{name}, {modes[0]}", logits.logits))
        return logits

    return launched


def run_variant(scale: Scale, changed: Path, good: Sequence[Path]) -> tuple[World, Steps]:
    world = build_world(scale, changed, good)
    steps = Steps(world, scale)
    steps.run()
    return world, steps


def compare(
    name: str, world: World, expected: Steps, found: Steps, overflows: Sequence[str] = OVERFLOWS
) -> Table:
    """One row for each path of steps: rows of others that differ, and failures that are wrong."""
    table: dict[str, dict[str, object]] = {}
    assert expected.digests.keys() == found.digests.keys(), "steps took other paths"
    for step, rows in found.digests.items():
        path = step.rsplit(": ", 1)[1]
        line = table.setdefault(path, {"adapter": name, "path": path, **dict.fromkeys(COUNTS, 0)})
        known = expected.digests[step]
        assert list(rows) == list(known), "rows have other places"
        theirs = {i for i, s in found.selections[step].items() if world.changed not in dict(s)}
        differ = [(i, n) for i in theirs for n, d in enumerate(rows[i]) if d != known[i][n]]
        broken = {i for i, row in rows.items() if not row[-1][1]}
        must = set(rows) - theirs if name in overflows else set()
        wrong = (found.failed[step] ^ broken) | (broken & theirs) | (must - broken)
        sizes = (1, sum(len(rows[i]) for i in theirs), len(differ), len(broken), len(wrong))
        for count, size in zip(COUNTS, sizes, strict=True):
            line[count] = int(str(line[count])) + size
        if differ or wrong:
            print(f"  {name}, {step}: rows {differ[:9]} differ, failures {sorted(wrong)[:9]}")
    return list(table.values())


def check_rows(scale: Scale, folder: Path) -> Section:
    good, variants = write_adapters(folder, scale)
    rows: Table = []
    expected: Steps | None = None
    for name, changed in variants.items():
        began = time.perf_counter()
        world, steps = run_variant(scale, changed, good)
        expected = steps if expected is None else expected
        overflows = () if scale.dtype == "float16" else OVERFLOWS
        rows += compare(name, world, expected, steps, overflows)
        print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)
        release(world.engine)
    title = f"Rows beside one adapter, {scale.dtype}, {scale.shape['hidden_size']} inputs"
    return Section(title=title, rows=rows)


def check_requests(scale: Scale, folder: Path) -> Section:
    """Request of an adapter that overflows end with its error; others get all their tokens."""
    good, variants = write_adapters(folder, scale)
    rows: Table = []
    for name in OVERFLOWS if scale.dtype != "float16" else ():
        world = build_world(scale, variants[name], good)
        world.engine.residency.release([world.changed, *world.good])
        requests = {
            f"r{number}": request(
                f"r{number}",
                [
                    (7 * number + 3 * at) % scale.shape["vocab_size"]
                    for at in range(1 + 11 * number % 90)
                ],
                selection,
                12,
                **({"top_k": 5, "temperature": 1.0} if number % 7 == 0 else {}),
            )
            for number, selection in enumerate(islice(cycle(world.mixed), scale.num_requests))
        }
        tokens, errors = answers(world.engine, list(requests.values()))
        bad = {n for n, one in requests.items() if world.changed in dict(one.selection)}
        wrong = [n for n in requests if n not in bad and (len(tokens[n]) != 12 or n in errors)]
        wrong += [n for n in bad if n not in errors or world.changed not in errors[n] or tokens[n]]
        rows.append({"adapter": name, "requests": len(requests), "bad": len(bad), "wrong": wrong})
        release(world.engine)
    return Section(title=f"Requests, {scale.dtype}", rows=rows)


def answers(engine: Engine, requests: Sequence[Any]) -> tuple[dict[str, list[int]], dict[str, str]]:
    tokens: dict[str, list[int]] = {one.request_id: [] for one in requests}
    errors: dict[str, str] = {}
    for one in requests:
        engine.add(one)
    while engine.has_work:
        for event in engine.step():
            if event.error is not None:
                assert event.error_code == "numeric", event.error
                errors[event.request_id] = event.error
            elif event.token_id is not None:
                tokens[event.request_id].append(event.token_id)
        engine.check_integrity()
    return tokens, errors


def release(engine: Engine) -> None:
    engine.close()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def is_right(section: Section) -> bool:
    faults = ("differ", "wrong failures", "wrong")
    return not any(row.get(fault) for row in section.rows for fault in faults)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shapes", type=names(tuple(SHAPES)), default=["small", "llama-3.1-8b"])
    dtypes = ("bfloat16", "float16", "float32")
    parser.add_argument("--dtypes", type=names(dtypes), default=["bfloat16"])
    parser.add_argument("--layers", type=int, default=2)
    return parser


def main() -> int:
    arguments = parse_arguments(make_parser())
    out = start_report("numeric", arguments, describe_machine(",".join(arguments.dtypes), "cuda"))
    sections = []
    for shape in arguments.shapes:
        for dtype in arguments.dtypes:
            settings = {**SHAPES[shape], "num_hidden_layers": arguments.layers}
            scale = Scale(settings, dtype)
            with tempfile.TemporaryDirectory() as name:
                for check in (check_rows, check_requests):
                    sections.append(check(scale, Path(name) / check.__name__))
                    out.add(sections[-1])
    out.finish()
    return 0 if all(map(is_right, sections)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
