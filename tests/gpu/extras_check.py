"""Compare the kernels of extras with their reference on a GPU, and time them.

    python -m tests.gpu.extras_check [--parts kernels,engine,times]

kernels  every kernel against its torch reference, in float32, float16 and bfloat16
engine   a small random model: graphs and steps without one against reference kernels
times    decode graphs of layers with the shapes of Llama-3.1-8B, with adapters of several kinds

Weights are random. It needs an NVIDIA GPU and takes about three minutes, most of them to compile.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.machine import describe_machine
from benchmarks.lib.random_weights import SHAPES, random_model
from benchmarks.lib.report import Section, Table, names, parse_arguments, start_report
from loramux.adapters.packed.extras import ExtraSpec
from loramux.config.engine import EngineConfig
from loramux.engine.build import build_engine
from loramux.engine.engine import Engine
from loramux.kernels.gpu.extras import ops
from loramux.kernels.gpu.extras.tables import LayerNumbers, ReplacedOutputs
from loramux.kernels.ops import ExtrasOps
from loramux.kernels.reference import extras as reference
from loramux.runner.device_choice import resolve_config
from loramux.runner.gpu_runner import BatchLimits, GpuRunner
from loramux.types.model import ATTENTION_BLOCK, LinearSpec
from loramux.types.request import Selection
from loramux.types.sampling import SamplingParams
from loramux.types.step import Chunk, SampleRow, StepPlan
from tests.chunk_factory import make_chunk
from tests.device_factory import runner_with
from tests.extras_factory import (
    BIAS,
    EMBEDDING,
    GAIN,
    HEAD,
    MODEL_LEVEL,
    ROWS,
    WEIGHT,
    ExtrasWorld,
    one,
    spec,
)
from tests.extras_models import A, Adapter, B, random_adapters, register

DEVICE = torch.device("cuda")
RELATIVE = "relative error"
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
HIDDEN, INNER, VOCAB = 576, 1536, 5003
WIDE_SITES = (
    LinearSpec("qkv", HIDDEN, ("q_proj", "k_proj", "v_proj"), (576, 200, 192), ATTENTION_BLOCK),
    LinearSpec("o", HIDDEN, ("o_proj",), (HIDDEN,), ATTENTION_BLOCK),
    LinearSpec("gate_up", HIDDEN, ("gate_proj", "up_proj"), (INNER, INNER)),
    LinearSpec("down", INNER, ("down_proj",), (HIDDEN,)),
)
QKV_WIDTH = 968


def wide_specs() -> dict[str, list[ExtraSpec]]:
    """Adapters whose matrices take several pages, with tails of blocks."""
    model = MODEL_LEVEL
    vectors = [spec(0, "qkv", kind, 1, QKV_WIDTH) for kind in (GAIN, BIAS)]
    vectors += [spec(model, HEAD, kind, VOCAB, 1) for kind in (GAIN, BIAS)]
    low_rank = [spec(model, HEAD, A, 40, HIDDEN), spec(model, HEAD, B, VOCAB, 40)]
    low_rank += [spec(model, EMBEDDING, A, VOCAB, 7), spec(model, EMBEDDING, B, 7, HIDDEN)]
    weights = [
        spec(0, "q_proj", WEIGHT, 576, HIDDEN),
        spec(0, "k_proj", WEIGHT, 200, HIDDEN),
        spec(0, "down_proj", WEIGHT, HIDDEN, INNER),
        spec(model, EMBEDDING, WEIGHT, VOCAB + 3, HIDDEN),
        spec(model, HEAD, WEIGHT, VOCAB + 3, HIDDEN),
    ]
    ids = tuple(range(17, VOCAB, 31))
    rows = [ExtraSpec(model, name, ROWS, len(ids), HIDDEN, ids) for name in (EMBEDDING, HEAD)]
    return {"vectors": vectors, "ranks": low_rank, "more": low_rank, "full": weights, "rows": rows}


def check_kernels() -> Section:
    table: Table = []
    for dtype, limit in LIMITS.items():
        world = ExtrasWorld(
            dtype,
            DEVICE,
            specs=wide_specs(),
            page_width=1 << 15,
            sites=WIDE_SITES,
            num_layers=1,
            vocab_size=VOCAB,
            num_sms=132,
        )
        mixed = [one("full")] * 3 + [one("vectors"), (), one("rows")]
        mixed += [(("more", 0.5), ("ranks", -2.0), ("vectors", 1.5))] * 20 + [one("full")] * 70
        for tile_rows in (16, 64):
            for name, error in kernel_errors(world, mixed, tile_rows).items():
                table.append(
                    {"kernel": name, "dtype": str(dtype), "tile": tile_rows} | {RELATIVE: error}
                )
                assert error <= limit, f"{name} in {dtype}: {error}"
    return Section(title="Kernels", rows=table, notes=("|found - reference| / |reference|.",))


def kernel_errors(
    world: ExtrasWorld, selections: Sequence[Selection], tile_rows: int
) -> dict[str, float]:
    """Return the relative error of each kernel; the rows of a graph that a step does not use are
    NaN.
    """
    dtype, count = world.dtype, len(selections)
    generator = torch.Generator(DEVICE).manual_seed(0)

    def noise(width: int) -> Tensor:
        values = torch.randn(count, width, device=DEVICE, generator=generator)
        return values.to(dtype)

    hidden, inner, bias = noise(HIDDEN), noise(INNER), noise(QKV_WIDTH)[0]
    hidden[4] = float("nan")
    tokens = torch.arange(count, device=DEVICE) * 31 % VOCAB
    tokens[:3] = torch.tensor([VOCAB + 2, 0, 48])
    logits = torch.cat((noise(VOCAB), noise(3).fill_(float("-inf"))), 1)
    tables = world.tables(selections, tile_rows)
    numbers = LayerNumbers(WIDE_SITES)
    absent = numbers.vector(1, numbers.vector_of["qkv"])
    qkv = ReplacedOutputs(0, WIDE_SITES[0].out_features, bias)
    down = ReplacedOutputs(numbers.matrix_of["down_proj"], (HIDDEN,), None)
    first = numbers.vector_of["qkv"]
    cases: dict[str, tuple[Tensor, Callable[[ExtrasOps, Tensor], None]]] = {
        "scale_add": (
            noise(QKV_WIDTH),
            lambda o, y: o.scale_add(tables, y, first),
        ),
        "absent vector": (noise(HIDDEN), lambda o, y: o.scale_add(tables, y, absent)),
        "embed_rows": (noise(HIDDEN), lambda o, y: o.embed_rows(tables, y, tokens, 3.0)),
        "qkv weights": (noise(QKV_WIDTH), lambda o, y: o.replace_outputs(tables, y, hidden, qkv)),
        "down weights": (noise(HIDDEN), lambda o, y: o.replace_outputs(tables, y, inner, down)),
        "head weights": (logits, lambda o, y: o.replace_logits(tables, y, hidden)),
        "head vectors": (logits, lambda o, y: o.scale_logits(tables, y)),
        "head low rank": (logits, lambda o, y: o.add_low_rank_logits(tables, y, hidden)),
    }
    errors = {}
    for name, (start, run) in cases.items():
        found, expected = start.clone(), start.clone()
        run(ops, found)
        run(reference, expected)
        is_finite = expected.isfinite()
        assert torch.equal(found.isfinite(), is_finite), f"{name}: other elements are finite"
        difference = (found[is_finite].double() - expected[is_finite].double()).norm()
        errors[name] = float(difference / expected[is_finite].double().norm())
    return errors


GREEDY = SampleRow(SamplingParams(temperature=0.0), 0, (), ())


def decode(number: int, token: int, start: int, pages: list[int], selection: Selection) -> Chunk:
    return make_chunk(number, (token,), start, pages, selection, sample=GREEDY)


def lease(engine: Engine, *selections: Selection) -> None:
    """Load the adapters of these selections and keep them on the device."""
    cids = {cid for selection in selections for cid, _ in selection}
    assert engine.residency.load_now(sorted(cids))


def make_engine(shape: dict[str, Any], dtype: str, **settings: Any) -> Engine:
    config, _ = resolve_config(
        EngineConfig(device="cuda", dtype=dtype, lora_augmented_ranks=0, **settings)
    )
    model = random_model(shape, getattr(torch, dtype), std=0.02)
    return build_engine(model, config)


def capture_wanted(runner: GpuRunner) -> None:
    while runner.prepare_next(only_wanted=True):
        pass


def check_engine() -> Section:
    table: Table = []
    for dtype in ("float32", "bfloat16"):
        settings = {"max_sequences": 16, "max_batch_tokens": 256, "max_model_len": 512}
        engine = make_engine(SHAPES["small"], dtype, device_memory_bytes=2**28, **settings)
        runner = engine.executor
        assert isinstance(runner, GpuRunner)
        adapters = random_adapters(engine.catalog.base, std=0.05)
        register(engine, adapters)
        names = [name for name in adapters if name != "wide"]
        total: Selection = (("dora", 0.5), ("ranks", -1.5), ("scales", 2.0))
        selections: list[Selection] = [*map(one, names), (), total, *map(one, names)]
        lease(engine, *selections, one("wide"))
        oracle = reference_runner(runner)
        for name, chosen in (("mixed", selections), ("added tokens", [one("wide"), (), total])):
            for step, error in engine_errors(engine, runner, oracle, chosen).items():
                table.append({"batch": name, "dtype": dtype, "step": step, RELATIVE: error})
                assert error <= LIMITS[getattr(torch, dtype)] * 10, table[-1]
        engine.close()
        del engine, runner, oracle
        torch.cuda.empty_cache()
    note = "Logits, against the same step without graphs and with the reference of these kernels."
    return Section(title="Engine", rows=table, notes=(note,))


def reference_runner(runner: GpuRunner) -> GpuRunner:
    limits = BatchLimits(max_batch_tokens=256, max_sequences=16, max_pages=8)
    return runner_with(runner, limits, extras=reference)


def engine_errors(
    engine: Engine, runner: GpuRunner, oracle: GpuRunner, selections: Sequence[Selection]
) -> dict[str, float]:
    """Relative errors of the logits of prefill and decode, without graphs and with them."""
    last, vocab = engine.pages.num_pages - 1, engine.catalog.base.vocab_size
    prompts = [tuple(range(7 + i, 12 + 3 * i)) for i in range(len(selections))]
    pages = [[last - 5 * i - n for n in range(5)] for i in range(len(selections))]
    prefills = tuple(
        make_chunk(i, prompts[i], 0, pages[i], selection, sample=GREEDY)
        for i, selection in enumerate(selections)
    )
    decodes = tuple(
        decode(i, 40, len(prompts[i]), pages[i], selection)
        for i, selection in enumerate(selections)
    )
    errors: dict[str, float] = {}
    for name, chunks, graphs in (
        ("prefill", prefills, runner.prefill_graphs),
        ("decode", decodes, runner.decode_graphs),
    ):
        plan = StepPlan(chunks)
        expected = {i: logits[-1] for i, logits in oracle.logits(plan).items()}
        eager = {i: logits[-1] for i, logits in runner.logits(plan).items()}
        errors[f"{name} without graph"] = relative(eager, expected)
        runner.run(plan)
        capture_wanted(runner)
        tokens = runner.run(plan).accepted
        best = {i: float(expected[i].max() - expected[i][tokens[i][0]]) for i in tokens}
        assert max(best.values()) < 0.1, f"{name}: chosen tokens are not the best ones, {best}"
        if len(next(iter(expected.values()))) > vocab:
            continue
        (launch,) = runner.trace()
        found = {sequence_id: logits.float() for sequence_id, logits in launch.logits.items()}
        assert any(mode.extras for _, mode in graphs.graphs.made), f"{name}: no graph was captured"
        errors[f"{name} graph"] = relative(found, expected)
    return errors


def relative(found: dict[int, Tensor], expected: dict[int, Tensor]) -> float:
    """Return the largest relative error of a row."""
    worst = 0.0
    for number, known in expected.items():
        is_finite = known.isfinite()
        assert torch.equal(found[number].isfinite(), is_finite), "other tokens are missing"
        difference = (found[number] - known)[is_finite].norm()
        worst = max(worst, float(difference / known[is_finite].norm()))
    return worst


NUM_LAYERS = 8
POOL_BYTES = 12 * 2**30
BATCHES = (1, 32, 128)


def timed_adapters(engine: Engine) -> dict[str, Adapter]:
    """Adapters of rank 16 without and with gains, weights of one projection, and a head."""
    base = engine.catalog.base
    shapes = {one.name: (one.in_features, one.out_features) for one in base.projections}

    def noise(rows: int, width: int) -> Tensor:
        part = torch.randn(min(rows, 512), width).mul_(0.02).bfloat16()
        return part.repeat(-(-rows // len(part)), 1)[:rows]

    low_rank = {
        (layer, name): (noise(16, width), noise(height, 16))
        for layer in range(base.num_layers)
        for name, (width, height) in shapes.items()
    }
    gains = {
        (layer, site.name, GAIN): noise(1, sum(site.out_features))
        for layer in range(base.num_layers)
        for site in base.linears
    }
    q_weights = {
        (layer, "q_proj", WEIGHT): noise(*reversed(shapes["q_proj"]))
        for layer in range(base.num_layers)
    }
    head = {(MODEL_LEVEL, HEAD, WEIGHT): noise(base.vocab_size, base.hidden_size)}
    found = {f"plain {i}": Adapter(low_rank) for i in range(3)}
    found |= {f"dora {i}": Adapter(low_rank, gains) for i in range(3)}
    return found | {"q": Adapter(extras=q_weights), "head": Adapter(extras=head)}


def time_steps() -> Section:
    shape = {**SHAPES["llama-3.1-8b"], "num_hidden_layers": NUM_LAYERS}
    began = time.perf_counter()
    settings = {"max_sequences": 128, "max_batch_tokens": 512, "max_model_len": 1024}
    engine = make_engine(shape, "bfloat16", device_memory_bytes=POOL_BYTES, **settings)
    runner = engine.executor
    assert isinstance(runner, GpuRunner)
    register(engine, timed_adapters(engine))
    kinds: dict[str, Selection] = {
        "base": (),
        "plain LoRA r16": one("plain 0"),
        "DoRA r16": one("dora 0"),
        "sum of 3 plain": tuple((f"plain {i}", 0.5) for i in range(3)),
        "sum of 3 DoRA": tuple((f"dora {i}", 0.5) for i in range(3)),
        "own q_proj": one("q"),
        "own lm_head": one("head"),
    }
    lease(engine, *kinds.values())
    print(f"engine and adapters in {time.perf_counter() - began:.0f} s", flush=True)
    table: Table = []
    for batch in BATCHES:
        replays = {}
        for name, selection in kinds.items():
            replays[name] = graph_of(engine, runner, selection, batch)
            if name.endswith("DoRA r16") or name.startswith("own"):
                replays[f"{name}, 1 row"] = graph_of(engine, runner, selection, batch, most=1)
        times = median_times(replays)
        for name, value in times.items():
            added = (value - times["base"]) * 1e6
            per_layer = None if "lm_head" in name else round(added / NUM_LAYERS, 1)
            table.append(
                {"tokens": batch, "adapters": name, "step in us": round(value * 1e6)}
                | {"added in us": round(added), "added per layer": per_layer}
            )
    notes = (
        f"{NUM_LAYERS} layers, bfloat16, context 16, no augmented weights, all rows one kind.",
    )
    return Section(title="Decode steps, Llama-3.1-8B shapes", rows=table, notes=notes)


def graph_of(
    engine: Engine, runner: GpuRunner, selection: Selection, batch: int, *, most: int | None = None
) -> Callable[[], None]:
    """Return a function that sends the inputs of a step and replays its graph; `most`:
    rows of it.
    """
    last = engine.pages.num_pages - 1
    count = batch if most is None else most
    chunks = tuple(
        decode(i, 40, 15, [last - i], selection if i < count else ()) for i in range(batch)
    )
    plan = StepPlan(chunks)
    runner.run(plan)
    began = time.perf_counter()
    capture_wanted(runner)
    runner.run(plan)
    ((_, mode),) = (launch.key for launch in runner.trace() if launch.key is not None)
    assert bool(mode.extras) == ("dora" in str(selection) or selection in (one("q"), one("head")))
    if (seconds := time.perf_counter() - began) > 1:
        print(f"{batch} rows, {mode}: captured in {seconds:.1f} s", flush=True)
    replay = runner.decode_graphs.graphs.made[batch, mode]

    def prepare() -> None:
        runner.run(plan)
        replay()

    prepare.replay = replay  # type: ignore[attr-defined]
    return prepare


def median_times(prepared: dict[str, Callable[[], None]], *, rounds: int = 5) -> dict[str, float]:
    """Median seconds of a replay, in turns, each after a step that filled its inputs."""
    times: dict[str, list[float]] = {name: [] for name in prepared}
    for _ in range(rounds):
        for name, prepare in prepared.items():
            prepare()
            replay: Callable[[], None] = prepare.replay  # type: ignore[attr-defined]
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(10):
                replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / 1e4)
    return {name: statistics.median(values) for name, values in times.items()}


PARTS = {"kernels": check_kernels, "engine": check_engine, "times": time_steps}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--parts", type=names(tuple(PARTS)), default=list(PARTS))
    arguments = parse_arguments(parser)
    machine = describe_machine("float32, float16, bfloat16", "cuda")
    out = start_report("extras-check", arguments, machine)
    for name in arguments.parts:
        began = time.perf_counter()
        out.add(PARTS[name]())
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    out.finish()


if __name__ == "__main__":
    main()
