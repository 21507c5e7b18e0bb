"""`loramux plan`: how many adapters fit in which tier, and the expected hit rates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loramux.cli.console import ByteView, printable, say, show_error, size_text
from loramux.config.fields import AUTO, parse_bytes
from loramux.errors import InvalidRequest, LoramuxError

if TYPE_CHECKING:
    from loramux.capacity.plan import (
        AdapterSize,
        Budgets,
        Fleet,
        GpuMemory,
        MeasuredAdapter,
        MemoryPlan,
        PlannedBase,
        TierPlan,
    )
    from loramux.config.engine import ResolvedConfig


DEFAULT_RANK = "16"
DEFAULT_TARGETS = "attention"


def show_plan(plan: MemoryPlan, console: Console, *, warnings: Iterable[str] = ()) -> None:
    for name, value in facts(plan):
        say(console, f"{name:<9}", value, style="bold")
    console.print(size_table(plan.sizes))
    parts = part_table(plan.sizes)
    if parts is not None:
        console.print(parts)
    for warning in warnings:
        say(console, "warning: ", warning, style="bold yellow")
    console.print(tier_table(plan))
    say(console, "KV cache ", kv_text(plan), style="bold")
    if plan.evicted.adapters:
        say(console, "Evicted  ", evicted_text(plan), style="bold")
    for sentence in plan.advice:
        is_good = plan.evicted.adapters == 0
        say(console, "→ ", sentence, style="bold green" if is_good else "bold yellow")


def facts(plan: MemoryPlan) -> Iterator[tuple[str, str]]:
    base = plan.base
    yield "Base", f"{base.name}, {base.num_layers} layers, {base.dtype}"
    stored = f" ({base.quantisation}, dequantised when loaded)" if base.quantisation else ""
    yield "Weights", f"{size_text(base.weight_bytes)}{stored}, besides the pool"
    if plan.gpu is not msgspec.UNSET:
        yield "GPU", gpu_text(plan.gpu)
    pages = f"{size_text(base.page_bytes)} each, {base.block_tokens} tokens of KV cache"
    yield "Pages", f"{pages} ({size_text(base.kv_token_bytes)} a token, {base.kv_dtype})"
    on = f" on {', '.join(plan.targets)}" if plan.targets else ""
    yield "Adapters", f"{plan.adapters}{on}"


def gpu_text(gpu: GpuMemory) -> str:
    taken = (
        (gpu.weight_bytes, "weights"),
        (gpu.augmented_bytes, "augmented weights"),
        (gpu.working_bytes, "working memory (estimate)"),
    )
    parts = ", ".join(f"{size_text(num_bytes)} {name}" for num_bytes, name in taken)
    return (
        f"{gpu.name}, {gpu.utilization:.0%} of {size_text(gpu.total_bytes)}: {parts}, "
        f"{size_text(gpu.pool_bytes)} page pool"
    )


def size_table(sizes: list[AdapterSize]) -> Table:
    has_names = any(size.name is not msgspec.UNSET for size in sizes)
    table = Table(*(["adapter"] if has_names else []))
    for column in ("rank", "adapters", "bytes", "pages", "on the device"):
        table.add_column(column, justify="right")
    for size in sizes:
        table.add_row(
            *([Text(printable(str(size.name)), overflow="fold")] if has_names else []),
            str(size.rank),
            str(size.count),
            size_text(size.bytes),
            str(size.pages),
            size_text(size.device_bytes),
        )
    return table


def part_table(sizes: list[AdapterSize]) -> Table | None:
    """Return a table of the parts of measured adapters by kind; None if no adapter was measured."""
    table = Table("adapter", "kind")
    for column in ("modules", "bytes", "read per token"):
        table.add_column(column, justify="right")
    for size in sizes:
        for part in [] if size.parts is msgspec.UNSET else size.parts:
            table.add_row(
                Text(printable(str(size.name)), overflow="fold"),
                part.kind,
                str(part.modules),
                size_text(part.bytes),
                size_text(part.token_bytes),
            )
    return table if table.rows else None


def tier_table(plan: MemoryPlan) -> Table:
    table = Table("tier", title="hit rates by tier", title_justify="left")
    columns = ("budget", "adapters", "used")
    for column in (*columns, f"Zipf {plan.zipf:g}", "with LRU", "uniform", "with LRU"):
        table.add_column(column, justify="right")
    for tier in plan.tiers:
        table.add_row(Text(tier.tier), *tier_cells(tier))
    return table


def tier_cells(tier: TierPlan) -> Iterator[str]:
    yield "" if tier.budget_bytes is None else size_text(tier.budget_bytes)
    yield str(tier.adapters)
    yield size_text(tier.used_bytes)
    for rate in (tier.zipf.ideal, tier.zipf.lru, tier.uniform.ideal, tier.uniform.lru):
        yield f"{rate:.1%}"


def kv_text(plan: MemoryPlan) -> str:
    kept = plan.kv_tokens_reserved
    return f"{plan.kv_tokens_left} tokens left beside these adapters; {kept} were reserved"


def evicted_text(plan: MemoryPlan) -> str:
    evicted = plan.evicted
    return (
        f"the {evicted.adapters} least popular adapters are not on the device: "
        f"{evicted.zipf_share:.1%} of the requests by Zipf {plan.zipf:g}, "
        f"{evicted.uniform_share:.1%} if all are equal"
    )


ModelFlag = Annotated[
    str | None,
    typer.Option(
        metavar="PATH|ORG/NAME",
        help="Base model: a Hugging Face folder, its config.json alone, a GGUF file, or a model of "
        "the hub as org/name; no weights are read. Default: the installed SmolLM2-135M-Instruct.",
    ),
]
AdaptersFlag = Annotated[int, typer.Option(help="Number of adapters.")]
RankFlag = Annotated[
    str | None,
    typer.Option(
        help="One rank, or several that the adapters take in turn: 8,16,32,64. Default: 16.",
        show_default=False,
    ),
]
TargetsFlag = Annotated[
    str | None,
    typer.Option(
        help="Target modules: q,k,v,o, attention (default), mlp, all, or any projections.",
        show_default=False,
    ),
]
FoldersFlag = Annotated[
    list[Path] | None,
    typer.Option(
        "--adapter",
        metavar="DIR",
        help="Instead of --rank and --targets: an adapter folder, whose parts are counted by kind; "
        "may be repeated, and the adapters take the sizes in turn.",
        show_default=False,
    ),
]
DeviceFlag = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Device that would serve: auto, cpu, cuda or cuda:N. A GPU stores adapters in whole "
        "pages, with LoRA A of bfloat16 bases in 12 bits.",
    ),
]
GpuFlag = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Instead of --device: a GPU from the table of memory sizes, such as h100, h200, "
        "a100-80, l40s, l4 or rtx4090; auto is the GPU of this machine.",
    ),
]
UtilizationFlag = Annotated[
    float, typer.Option(help="Fraction of the GPU's memory that the server uses.")
]
PoolFlag = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Size of the page pool, such as 8GiB. Default: that of `loramux serve`.",
    ),
]
TotalFlag = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Instead of --device-memory: total memory of the device, such as 80GiB. The pool is "
        "what --gpu-memory-utilization, the weights and the working memory leave of it.",
    ),
]
HostFlag = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        help="Host memory for adapters; auto is that of `loramux serve` on this machine.",
    ),
]
DiskFlag = Annotated[str, typer.Option(metavar="SIZE", help="Disk space for adapters.")]
KvFlag = Annotated[
    int | None,
    typer.Option(
        help="Tokens of KV cache to keep free. Default: 16384, or half the pool if that is less."
    ),
]
FractionFlag = Annotated[
    float, typer.Option(help="Largest fraction of the pool that adapters may take.")
]
ZipfFlag = Annotated[
    float, typer.Option(help="Zipf exponent of the adapters' popularity; 0: all equal.")
]
DtypeFlag = Annotated[
    str, typer.Option(help="auto, bfloat16 (bf16), float16 (fp16) or float32 (fp32).")
]
KvDtypeFlag = Annotated[str, typer.Option(help="Data type of the KV cache; auto: that of --dtype.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanArguments:
    """The flags of the command."""

    model: str | None
    adapters: int
    rank: str | None
    targets: str | None
    folders: tuple[Path, ...]
    device: str
    gpu: str | None
    device_memory: str | None
    device_total: str | None
    gpu_memory_utilization: float
    host_memory: str
    disk_space: str
    kv_tokens: int | None
    adapter_memory_fraction: float
    zipf: float
    dtype: str
    kv_cache_dtype: str


def plan(  # noqa: PLR0913  (one for each flag)
    adapters: AdaptersFlag,
    model: ModelFlag = None,
    rank: RankFlag = None,
    targets: TargetsFlag = None,
    adapter: FoldersFlag = None,
    device: DeviceFlag = "auto",
    gpu: GpuFlag = None,
    device_memory: PoolFlag = None,
    device_total: TotalFlag = None,
    gpu_memory_utilization: UtilizationFlag = 0.9,
    host_memory: HostFlag = "auto",
    disk_space: DiskFlag = "8GiB",
    kv_tokens: KvFlag = None,
    adapter_memory_fraction: FractionFlag = 1.0,
    zipf: ZipfFlag = 1.0,
    dtype: DtypeFlag = "auto",
    kv_cache_dtype: KvDtypeFlag = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Compute how many adapters fit on the device, in host memory and on disk.

    Sizes of adapters and pages are exact. The page pool of a GPU is an estimate: an engine
    measures its working memory. Hit rates are expected fractions of requests, for a Zipf and for a
    uniform popularity: the optimum, and with least-recently-used eviction.
    """
    arguments = PlanArguments(
        model=model,
        adapters=adapters,
        rank=rank,
        targets=targets,
        folders=tuple(adapter or ()),
        device=device,
        gpu=gpu,
        device_memory=device_memory,
        device_total=device_total,
        gpu_memory_utilization=gpu_memory_utilization,
        host_memory=host_memory,
        disk_space=disk_space,
        kv_tokens=kv_tokens,
        adapter_memory_fraction=adapter_memory_fraction,
        zipf=zipf,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
    )
    try:
        made, warnings = make_plan(arguments)
    except (LoramuxError, OSError) as error:
        show_error(Console(stderr=True), str(error))
        raise typer.Exit(2 if isinstance(error, InvalidRequest) else 1) from error
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(made)).decode())
    else:
        show_plan(made, Console(), warnings=warnings)


def make_plan(arguments: PlanArguments) -> tuple[MemoryPlan, list[str]]:
    """Return the plan, and what the full modules of measured adapters cost."""
    # Imported here and below: numpy and torch slow down `--help`.
    from loramux.capacity.parts import full_module_warnings
    from loramux.capacity.planner import plan_memory

    if not arguments.folders:
        # A wrong flag is refused before a model is fetched.
        planned_ranks(arguments)
    device = planned_device(arguments)
    base = planned_base(arguments, device.config)
    measured = measure_folders(arguments, base)
    fleet = planned_fleet(arguments, measured, base)
    gpu = gpu_memory(arguments, base, device)
    plan = plan_memory(base, fleet, budgets(arguments, base, device, gpu), gpu=gpu or msgspec.UNSET)
    distinct = dict.fromkeys(measured)
    return plan, [text for one in distinct for text in full_module_warnings(base, one)]


def planned_ranks(arguments: PlanArguments) -> tuple[int, ...]:
    return parse_ranks(DEFAULT_RANK if arguments.rank is None else arguments.rank)


def planned_fleet(
    arguments: PlanArguments, measured: tuple[MeasuredAdapter, ...], base: PlannedBase
) -> Fleet:
    from loramux.capacity.plan import Fleet, parse_targets

    if measured:
        return Fleet(num_adapters=arguments.adapters, measured=measured, zipf=arguments.zipf)
    targets = DEFAULT_TARGETS if arguments.targets is None else arguments.targets
    names = [name.strip() for name in targets.split(",") if name.strip()]
    return Fleet(
        num_adapters=arguments.adapters,
        ranks=planned_ranks(arguments),
        targets=parse_targets(names, base.shapes),
        zipf=arguments.zipf,
    )


def measure_folders(arguments: PlanArguments, base: PlannedBase) -> tuple[MeasuredAdapter, ...]:
    """Measure adapter folders by config and header; no weights are read."""
    if not arguments.folders:
        return ()
    if arguments.rank is not None or arguments.targets is not None:
        raise InvalidRequest(
            "--adapter says ranks and targets. Leave --rank and --targets out.", param="adapter"
        )
    from loramux.adapters.peft.folder import open_folder
    from loramux.adapters.peft.inspection import Inspector
    from loramux.capacity.parts import measure_adapter

    inspector = Inspector(base.shapes)
    found = [inspector.inspect(open_folder(folder.expanduser())) for folder in arguments.folders]
    names = [folder.resolve().name for folder in arguments.folders]
    return tuple(
        measure_adapter(base, name, adapter.ranks, adapter.extras)
        for name, adapter in zip(names, found, strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDevice:
    """The device to plan for, and the settings of an engine on it."""

    config: ResolvedConfig
    name: str = ""
    total_bytes: int | None = None
    """The memory of a GPU, if it is in the table or in this machine."""


def planned_device(arguments: PlanArguments) -> PlannedDevice:
    from loramux.capacity.gpus import gpu_total_bytes
    from loramux.config.engine import EngineConfig
    from loramux.memory.host_memory import available_memory_bytes

    config = EngineConfig(
        device=arguments.device,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        adapter_memory_fraction=arguments.adapter_memory_fraction,
    )
    if arguments.gpu in (None, AUTO):
        device, name, total = local_device(arguments.device)
    elif arguments.device == AUTO:
        assert arguments.gpu is not None
        device, name, total = "cuda", arguments.gpu, gpu_total_bytes(arguments.gpu)
    else:
        raise InvalidRequest("Give either --gpu or --device.", param="gpu")
    resolved = config.resolve(device, available_bytes=available_memory_bytes())
    return PlannedDevice(config=resolved, name=name, total_bytes=total)


def local_device(wanted: str) -> tuple[str, str, int | None]:
    """Return the device, and the name and memory of the GPU of this machine that it
    means, if any.
    """
    from loramux.memory.gpus import GpuFault, visible_gpus
    from loramux.runner.device_choice import choose_device

    device = choose_device().device if wanted == AUTO else wanted
    gpus = [] if device == "cpu" else visible_gpus()
    if isinstance(gpus, GpuFault):
        return device, device, None
    index = int(device.partition(":")[2] or 0)
    found = [(gpu.name, gpu.total_bytes) for gpu in gpus if gpu.index == index]
    return device, *(found[0] if found else (device, None))


def planned_base(arguments: PlanArguments, config: ResolvedConfig) -> PlannedBase:
    from loramux.capacity.plan import PlannedBase, parse_dtype
    from loramux.models.dtypes import resolve_dtype
    from loramux.models.folder import describe_model
    from loramux.models.locate import locate_model

    with ByteView() as bar:
        model = describe_model(locate_model(arguments.model, sink=bar, with_weights=False))
    dtype = arguments.dtype
    if dtype == AUTO:
        kind = "cuda" if config.is_gpu else "cpu"
        count = model.num_parameters
        dtype = str(resolve_dtype(AUTO, kind, num_parameters=count)).removeprefix("torch.")
    kv_dtype = arguments.kv_cache_dtype
    return PlannedBase(
        name=model.name,
        shapes=model,
        dtype=parse_dtype(dtype),
        kv_dtype="" if kv_dtype == AUTO else parse_dtype(kv_dtype, "kv_cache_dtype"),
        block_tokens=config.block_tokens,
        packing="paged" if config.is_gpu else "dense",
    )


def gpu_memory(
    arguments: PlanArguments, base: PlannedBase, device: PlannedDevice
) -> GpuMemory | None:
    """Return the memory of the GPU by use; None for a CPU, or if the size of the pool is given."""
    from loramux.capacity.gpus import GpuSettings, plan_gpu_memory

    if arguments.device_memory is not None and arguments.device_total is not None:
        raise InvalidRequest("Give either --device-memory or --device-total.", param="device_total")
    if arguments.device_memory is not None or not device.config.is_gpu:
        return None
    total = device.total_bytes
    if arguments.device_total is not None:
        total = parse_bytes(arguments.device_total)
    if total is None:
        raise InvalidRequest(
            "This machine has no such GPU. Name one with --gpu, or give --device-total, its "
            "memory, or --device-memory, the page pool.",
            param="device_total",
        )
    settings = GpuSettings(
        max_batch_tokens=device.config.max_batch_tokens,
        max_sequences=device.config.max_sequences,
        augmented_ranks=device.config.lora_augmented_ranks,
        utilization=device.config.gpu_memory_utilization,
    )
    return plan_gpu_memory(device.name, total, base, settings)


def budgets(
    arguments: PlanArguments, base: PlannedBase, device: PlannedDevice, gpu: GpuMemory | None
) -> Budgets:
    from loramux.capacity.plan import Budgets

    host = arguments.host_memory
    return Budgets(
        device_bytes=gpu.pool_bytes if gpu is not None else pool_bytes(arguments, base),
        host_bytes=device.config.host_memory_bytes if host == AUTO else parse_bytes(host),
        disk_bytes=parse_bytes(arguments.disk_space),
        kv_tokens=arguments.kv_tokens,
        adapter_fraction=arguments.adapter_memory_fraction,
    )


def pool_bytes(arguments: PlanArguments, base: PlannedBase) -> int:
    """Return the size of the pool if it is given, or in the memory of a CPU."""
    from loramux.memory.host_memory import default_pool_bytes

    if arguments.device_memory is not None:
        return parse_bytes(arguments.device_memory)
    if arguments.device_total is None:
        return default_pool_bytes()
    share = arguments.gpu_memory_utilization
    left = int(share * parse_bytes(arguments.device_total)) - base.weight_bytes
    if left <= 0:
        raise InvalidRequest(
            f"The weights alone take {base.weight_bytes} bytes in {base.dtype}, more than "
            f"{share:.0%} of {arguments.device_total}.",
            param="device_total",
        )
    return left


def parse_ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidRequest(
            f"--rank must be one number or several like 8,16,32, got {text!r}.", param="rank"
        ) from error
