"""`loramux plan`: how many adapters fit in which tier, and the expected hit rates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loramux.cli.console import say, show_error, size_text
from loramux.config.fields import parse_bytes
from loramux.errors import InvalidRequest, LoramuxError

if TYPE_CHECKING:
    from loramux.capacity.plan import AdapterSize, Budgets, MemoryPlan, PlannedBase, TierPlan


def show_plan(plan: MemoryPlan, console: Console) -> None:
    for name, value in facts(plan):
        say(console, f"{name:<9}", value, style="bold")
    console.print(size_table(plan.sizes))
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
    yield "Weights", f"{size_text(base.weight_bytes)}, besides the pool"
    pages = f"{size_text(base.page_bytes)} each, {base.block_tokens} tokens of KV cache"
    yield "Pages", f"{pages} ({size_text(base.kv_token_bytes)} a token)"
    yield "Adapters", f"{plan.adapters} on {', '.join(plan.targets)}"


def size_table(sizes: list[AdapterSize]) -> Table:
    table = Table()
    for column in ("rank", "adapters", "bytes", "pages", "on the device"):
        table.add_column(column, justify="right")
    for size in sizes:
        table.add_row(
            str(size.rank),
            str(size.count),
            size_text(size.bytes),
            str(size.pages),
            size_text(size.device_bytes),
        )
    return table


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


# The rest of the device's memory is for activations and other allocations.
USABLE_FRACTION = 0.9

ModelFlag = Annotated[
    Path | None,
    typer.Option(
        help="Base model: a Hugging Face folder, its config.json alone, or a GGUF file; no weights "
        "are read. Default: the installed SmolLM2-135M-Instruct."
    ),
]
AdaptersFlag = Annotated[int, typer.Option(help="Number of adapters.")]
RankFlag = Annotated[
    str, typer.Option(help="One rank, or several that the adapters take in turn: 8,16,32,64.")
]
TargetsFlag = Annotated[
    str, typer.Option(help="Target modules: q,k,v,o, attention, mlp, all, or any projections.")
]
DeviceFlag = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Device that would serve: cpu, cuda or cuda:N. A GPU stores adapters in whole pages, "
        "with LoRA A of bfloat16 bases in 12 bits.",
    ),
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
        "then 90 % of it minus the weights.",
    ),
]
HostFlag = Annotated[str, typer.Option(metavar="SIZE", help="Host memory for adapters.")]
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
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanArguments:
    """The flags of the command."""

    model: Path | None
    adapters: int
    rank: str
    targets: str
    device: str
    device_memory: str | None
    device_total: str | None
    host_memory: str
    disk_space: str
    kv_tokens: int | None
    adapter_memory_fraction: float
    zipf: float
    dtype: str


def plan(  # noqa: PLR0913  (one for each flag)
    adapters: AdaptersFlag,
    model: ModelFlag = None,
    rank: RankFlag = "16",
    targets: TargetsFlag = "q,k,v,o",
    device: DeviceFlag = "cpu",
    device_memory: PoolFlag = None,
    device_total: TotalFlag = None,
    host_memory: HostFlag = "1GiB",
    disk_space: DiskFlag = "8GiB",
    kv_tokens: KvFlag = None,
    adapter_memory_fraction: FractionFlag = 1.0,
    zipf: ZipfFlag = 1.0,
    dtype: DtypeFlag = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Compute how many adapters fit on the device, in host memory and on disk.

    Sizes are exact. Hit rates are expected fractions of requests, for a Zipf and for a uniform
    popularity: the optimum, and with least-recently-used eviction.
    """
    arguments = PlanArguments(
        model=model,
        adapters=adapters,
        rank=rank,
        targets=targets,
        device=device,
        device_memory=device_memory,
        device_total=device_total,
        host_memory=host_memory,
        disk_space=disk_space,
        kv_tokens=kv_tokens,
        adapter_memory_fraction=adapter_memory_fraction,
        zipf=zipf,
        dtype=dtype,
    )
    try:
        made = make_plan(arguments)
    except (LoramuxError, OSError) as error:
        show_error(Console(stderr=True), str(error))
        raise typer.Exit(2 if isinstance(error, InvalidRequest) else 1) from error
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(made)).decode())
    else:
        show_plan(made, Console())


def make_plan(arguments: PlanArguments) -> MemoryPlan:
    # Imported here and below: numpy and torch slow down `--help`.
    from loramux.capacity.plan import Fleet, parse_targets
    from loramux.capacity.planner import plan_memory

    fleet = Fleet(
        num_adapters=arguments.adapters,
        ranks=parse_ranks(arguments.rank),
        targets=parse_targets(
            [name.strip() for name in arguments.targets.split(",") if name.strip()]
        ),
        zipf=arguments.zipf,
    )
    base = planned_base(arguments)
    return plan_memory(base, fleet, budgets(arguments, base))


def planned_base(arguments: PlanArguments) -> PlannedBase:
    from loramux.capacity.plan import PlannedBase, parse_dtype
    from loramux.models.default_model import default_model_path
    from loramux.models.dtypes import resolve_dtype
    from loramux.models.folder import describe_model

    model = describe_model(arguments.model or default_model_path())
    dtype = arguments.dtype
    if dtype == "auto":
        count = model.num_parameters
        device = "cuda" if is_gpu(arguments) else "cpu"
        dtype = str(resolve_dtype("auto", device, num_parameters=count)).removeprefix("torch.")
    return PlannedBase(
        name=model.name,
        shapes=model,
        dtype=parse_dtype(dtype),
        packing="paged" if is_gpu(arguments) else "dense",
    )


def is_gpu(arguments: PlanArguments) -> bool:
    kind = arguments.device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise InvalidRequest(
            f"--device must be cpu, cuda or cuda:N, got {arguments.device!r}.", param="device"
        )
    return kind == "cuda"


def budgets(arguments: PlanArguments, base: PlannedBase) -> Budgets:
    from loramux.capacity.plan import Budgets

    return Budgets(
        device_bytes=pool_bytes(arguments, base),
        host_bytes=parse_bytes(arguments.host_memory),
        disk_bytes=parse_bytes(arguments.disk_space),
        kv_tokens=arguments.kv_tokens,
        adapter_fraction=arguments.adapter_memory_fraction,
    )


def pool_bytes(arguments: PlanArguments, base: PlannedBase) -> int:
    if arguments.device_memory is not None and arguments.device_total is not None:
        raise InvalidRequest("Give either --device-memory or --device-total.", param="device_total")
    if arguments.device_memory is not None:
        return parse_bytes(arguments.device_memory)
    if arguments.device_total is not None:
        left = int(USABLE_FRACTION * parse_bytes(arguments.device_total)) - base.weight_bytes
        if left <= 0:
            raise InvalidRequest(
                f"The weights alone take {base.weight_bytes} bytes in {base.dtype}, more than "
                f"{USABLE_FRACTION:.0%} of {arguments.device_total}.",
                param="device_total",
            )
        return left
    if is_gpu(arguments):
        raise InvalidRequest(
            "Give --device-total, the memory of the GPU, or --device-memory, the page pool.",
            param="device_total",
        )
    from loramux.memory.host_memory import default_pool_bytes

    return default_pool_bytes()


def parse_ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidRequest(
            f"--rank must be one number or several like 8,16,32, got {text!r}.", param="rank"
        ) from error
