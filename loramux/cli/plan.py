"""`loramux plan`: how many adapters fit where, and what requests will feel of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console

from loramux.cli.plan_view import show_plan
from loramux.cli.serve_view import show_error
from loramux.config.fields import parse_bytes
from loramux.errors import InvalidRequest, LoramuxError

if TYPE_CHECKING:
    from loramux.capacity.plan import Budgets, MemoryPlan, PlannedBase

# The rest is for activations and whatever else the device must hold.
USABLE_SHARE = 0.9

ModelFlag = Annotated[
    Path | None,
    typer.Option(
        help="Base model: a Hugging Face folder, its config.json alone, or a GGUF file; no weights "
        "are read. Default: the installed SmolLM2-135M-Instruct."
    ),
]
AdaptersFlag = Annotated[int, typer.Option(help="How many adapters.")]
RankFlag = Annotated[str, typer.Option(help="One rank, or several to deal out: 8,16,32,64.")]
TargetsFlag = Annotated[
    str, typer.Option(help="What they change: q,k,v,o, attention, mlp, all, or any projections.")
]
PoolFlag = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="The page pool, as for `loramux serve`, such as 8GiB. Default: what serve would take.",
    ),
]
TotalFlag = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="In place of --device-memory: all memory of the device, such as 80GiB. The pool is "
        "then what the weights leave of 90 % of it.",
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
    float, typer.Option(help="Largest share of the pool that adapters may take.")
]
ZipfFlag = Annotated[
    float, typer.Option(help="How unequal the adapters' popularity is; 0: all equal.")
]
DtypeFlag = Annotated[
    str, typer.Option(help="auto, bfloat16 (bf16), float16 (fp16) or float32 (fp32).")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object, nothing else.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    model: Path | None
    adapters: int
    rank: str
    targets: str
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
    """Say how many adapters fit on the device, in host memory and on disk.

    Sizes are those that serving takes, to the byte. Hit rates are expected shares of requests, for
    a Zipf popularity and for an equal one: at best, and under least-recently-used eviction.
    """
    asked = Asked(
        model=model,
        adapters=adapters,
        rank=rank,
        targets=targets,
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
        made = make_plan(asked)
    except (LoramuxError, OSError) as error:
        show_error(Console(stderr=True), str(error))
        raise typer.Exit(2 if isinstance(error, InvalidRequest) else 1) from error
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(made)).decode())
    else:
        show_plan(made, Console())


def make_plan(asked: Asked) -> MemoryPlan:
    # Imported here and below, because numpy and torch take time that `--help` should not.
    from loramux.capacity.plan import Fleet, parse_targets
    from loramux.capacity.planner import plan_memory

    fleet = Fleet(
        num_adapters=asked.adapters,
        ranks=parse_ranks(asked.rank),
        targets=parse_targets([name.strip() for name in asked.targets.split(",") if name.strip()]),
        zipf=asked.zipf,
    )
    base = planned_base(asked)
    return plan_memory(base, fleet, budgets(asked, base))


def planned_base(asked: Asked) -> PlannedBase:
    from loramux.capacity.plan import PlannedBase, parse_dtype
    from loramux.models.default_model import default_model_path
    from loramux.models.dtypes import resolve_dtype
    from loramux.models.loader import describe_model

    model = describe_model(asked.model or default_model_path())
    dtype = asked.dtype
    if dtype == "auto":
        count = model.num_parameters
        dtype = str(resolve_dtype("auto", num_parameters=count)).removeprefix("torch.")
    dtype = parse_dtype(dtype)
    return PlannedBase(name=model.name, shapes=model, dtype=dtype)


def budgets(asked: Asked, base: PlannedBase) -> Budgets:
    from loramux.capacity.plan import Budgets

    return Budgets(
        device_bytes=pool_bytes(asked, base),
        host_bytes=parse_bytes(asked.host_memory),
        disk_bytes=parse_bytes(asked.disk_space),
        kv_tokens=asked.kv_tokens,
        adapter_fraction=asked.adapter_memory_fraction,
    )


def pool_bytes(asked: Asked, base: PlannedBase) -> int:
    if asked.device_memory is not None and asked.device_total is not None:
        raise InvalidRequest("Give either --device-memory or --device-total.", param="device_total")
    if asked.device_memory is not None:
        return parse_bytes(asked.device_memory)
    if asked.device_total is not None:
        left = int(USABLE_SHARE * parse_bytes(asked.device_total)) - base.weight_bytes
        if left <= 0:
            raise InvalidRequest(
                f"The weights alone take {base.weight_bytes} bytes in {base.dtype}, more than "
                f"{USABLE_SHARE:.0%} of {asked.device_total}.",
                param="device_total",
            )
        return left
    from loramux.memory.device import default_pool_bytes

    return default_pool_bytes()


def parse_ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidRequest(
            f"--rank must be one number or several like 8,16,32, got {text!r}.", param="rank"
        ) from error
