"""`loramux plan`: sizes, hit rates and output."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from loramux.capacity.plan import Budgets, Fleet, PlannedBase
from loramux.capacity.planner import plan_memory
from loramux.cli.main import app
from loramux.cli.plan import show_plan
from loramux.memory.gpus import Gpu
from loramux.runner.device_choice import DeviceChoice
from loramux.types.model import BaseModelInfo
from tests.adapter_factory import (
    lora_config_dict,
    lora_tensors,
    tiny_llama_config,
    write_adapter,
)
from tests.linear_specs import specs_of
from tests.model_factory import tiny_config

MIB = 2**20


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("models") / "tiny" / "config.json"
    file.parent.mkdir()
    content = {**tiny_config("qwen3").to_dict(), "architectures": ["Qwen3ForCausalLM"]}
    file.write_text(json.dumps(content))
    return file


def run_plan(*options: str) -> Result:
    return CliRunner().invoke(app, ["plan", *options], env={"COLUMNS": "140"})


def plan_json(config: Path, *options: str) -> dict[str, Any]:
    result = run_plan("--model", str(config), "--json", *options)
    assert result.exit_code == 0, result.output
    plan: dict[str, Any] = json.loads(result.output)
    return plan


def test_a_config_file_is_enough_for_a_plan(config: Path) -> None:
    plan = plan_json(
        config,
        *("--adapters", "300", "--rank", "8,16", "--targets", "q,v", "--dtype", "bf16"),
        *("--device-memory", "2MiB", "--host-memory", "1MiB", "--kv-tokens", "64", "--zipf", "1.2"),
    )
    # q_proj is 64 -> 128, v_proj 64 -> 64, in three layers of two-byte numbers.
    assert [size["bytes"] for size in plan["sizes"]] == [15_360, 30_720]
    assert plan["base"]["name"] == "tiny" and plan["base"]["dtype"] == "bfloat16"
    assert plan["targets"] == ["q_proj", "v_proj"]
    assert [tier["budget_bytes"] for tier in plan["tiers"]] == [2 * MIB, MIB, 8 * 2**30, None]
    assert plan["zipf"] == 1.2 and plan["kv_tokens_reserved"] == 64


def test_a_gpu_stores_adapters_in_whole_pages(config: Path) -> None:
    options = ("--adapters", "3", "--rank", "8", "--device-memory", "2MiB")
    plan = plan_json(config, *options, "--device", "cuda:1")
    [size] = plan["sizes"]
    assert (plan["base"]["dtype"], plan["base"]["packing"]) == ("bfloat16", "paged")
    assert size["bytes"] == size["pages"] * plan["base"]["page_bytes"] == size["device_bytes"]
    assert "gpu" not in plan, "the size of the pool is given"


def test_a_gpu_of_the_table_has_the_pool_that_weights_and_working_memory_leave(
    config: Path,
) -> None:
    options = ("--gpu", "H200", "--adapters", "3", "--rank", "8")
    plan = plan_json(config, *options)
    gpu = plan["gpu"]
    assert gpu["name"] == "H200" and gpu["total_bytes"] == int(139.8 * 2**30)
    # The rows behind qkv, o, gate and up, and down, of three layers in two-byte numbers.
    assert gpu["augmented_bytes"] == 256 * (3 * 64 + 128 + 2 * 64 + 96) * 3 * 2
    taken = gpu["weight_bytes"] + gpu["augmented_bytes"] + gpu["working_bytes"]
    assert gpu["pool_bytes"] == int(0.9 * gpu["total_bytes"]) - taken
    assert plan["tiers"][0]["budget_bytes"] == gpu["pool_bytes"]
    less = plan_json(config, *options, "--gpu-memory-utilization", "0.5")["gpu"]
    assert gpu["pool_bytes"] - less["pool_bytes"] == pytest.approx(0.4 * gpu["total_bytes"])
    given = plan_json(config, "--adapters", "3", "--device", "cuda", "--device-total", "40GiB")
    assert given["gpu"]["total_bytes"] == 40 * 2**30
    assert given["gpu"]["working_bytes"] == gpu["working_bytes"]


def test_host_memory_and_the_device_are_those_of_a_server_here(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loramux.memory.host_memory.available_memory_bytes", lambda: 2**35)
    assert (
        plan_json(config, "--adapters", "3", "--gpu", "h100")["tiers"][1]["budget_bytes"] == 2**33
    )
    card = Gpu(1, "NVIDIA X", (9, 0), 2**34)
    monkeypatch.setattr("loramux.memory.gpus.visible_gpus", lambda: [card])
    choice = DeviceChoice(device="cuda:1", gpu_name=card.name)
    monkeypatch.setattr("loramux.runner.device_choice.choose_device", lambda: choice)
    gpu = plan_json(config, "--adapters", "3", "--gpu", "auto")["gpu"]
    assert gpu == plan_json(config, "--adapters", "3")["gpu"]
    assert (gpu["name"], gpu["total_bytes"]) == ("NVIDIA X", 2**34)
    on_cpu = plan_json(config, "--adapters", "3", "--device", "cpu")
    assert on_cpu["base"]["packing"] == "dense"
    assert on_cpu["tiers"][1]["budget_bytes"] == 2**30


def test_the_pool_is_what_the_weights_leave_of_the_device(config: Path) -> None:
    options = ("--device", "cpu", "--device-total", "10MiB", "--dtype", "fp16")
    plan = plan_json(config, "--adapters", "3", *options)
    weights = plan["base"]["weight_bytes"]
    assert plan["tiers"][0]["budget_bytes"] == int(0.9 * 10 * MIB) - weights


def test_the_text_shows_the_memory_of_the_gpu(config: Path) -> None:
    result = run_plan("--model", str(config), "--gpu", "l4", "--adapters", "100000")
    assert "l4, 90% of 22 GiB" in result.output and "(estimate)" in result.output
    assert "adapters need a page pool of" in result.output
    assert "Raise --device-memory" not in result.output


def test_table_shows_sizes_tiers_and_advice(config: Path) -> None:
    result = run_plan("--model", str(config.parent), "--adapters", "500", "--device-memory", "4MiB")
    assert result.exit_code == 0
    for text in ("tiny, 3 layers", "device", "source", "Zipf 1", "Raise --device-memory to"):
        assert text in result.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--rank", "big"], "--rank must be"),
        (["--rank", "0"], "rank must be"),
        (["--targets", "q,quark"], "has no target 'quark'"),
        (["--device-memory", "lots"], "is not a size"),
        (["--device-memory", "1GiB", "--device-total", "2GiB"], "either --device-memory or"),
        (["--device", "cpu", "--device-total", "1KiB"], "The weights alone take"),
        (["--gpu", "h200", "--device-total", "1GiB"], "together more than 90%"),
        (["--gpu", "h20"], "Did you mean h200?"),
        (["--gpu", "h200", "--device", "cpu"], "either --gpu or --device"),
        (["--device", "cuda:9"], "Name one with --gpu"),
        (["--device", "tpu"], "auto, cpu, cuda or cuda:N"),
        (["--dtype", "int4"], "dtype must be one of"),
        (["--adapters", "0"], "adapters must be"),
        (["--adapter-memory-fraction", "2"], "adapter_memory_fraction must be"),
    ],
)
def test_a_wrong_flag_is_a_usage_error(config: Path, options: list[str], says: str) -> None:
    result = run_plan("--model", str(config), "--adapters", "5", *options)
    assert result.exit_code == 2
    assert says in result.output


def test_a_model_that_is_not_there_fails_with_a_sentence(tmp_path: Path) -> None:
    result = run_plan("--model", str(tmp_path / "none"), "--adapters", "5")
    assert result.exit_code == 1
    assert "does not exist" in result.output and "Traceback" not in result.output


SHAPES = BaseModelInfo(
    name="base",
    architecture="LlamaForCausalLM",
    num_layers=4,
    linears=specs_of({f"{name}_proj": (640, 640) for name in "qkvo"}),
    num_kv_heads=4,
    head_dim=64,
    vocab_size=512,
    num_parameters=10**6,
)


def shown(num_adapters: int, **options: Any) -> str:
    base = PlannedBase(name="base\x1b[2J", shapes=SHAPES, dtype="bfloat16")
    fleet = Fleet(num_adapters=num_adapters, ranks=(8, 64), targets=("q_proj",))
    budgets = Budgets(device_bytes=2**24, host_bytes=2**25, disk_bytes=2**40, kv_tokens=512)
    console = Console(file=io.StringIO(), width=140)
    show_plan(plan_memory(base, fleet, budgets), console, **options)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_every_rank_and_every_tier_has_its_row() -> None:
    text = shown(100)
    rows = [[cell.strip() for cell in line.split("│")] for line in text.splitlines() if "│" in line]
    assert [row[1:4] for row in rows[:2]] == [["8", "50", "80 KiB"], ["64", "50", "640 KiB"]]
    assert [row[1] for row in rows[2:]] == ["device", "host", "disk", "source"]
    assert "least popular adapters are not on the device" in text


def test_no_eviction_is_shown_if_all_adapters_fit() -> None:
    text = shown(10)
    assert "least popular" not in text and "All 10 adapters fit" in text


def test_a_name_cannot_steer_the_terminal() -> None:
    assert "\x1b" not in shown(10)


def test_an_adapter_folder_is_measured_by_kind(tmp_path: Path) -> None:
    shapes = tiny_llama_config()
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**shapes.to_dict(), "architectures": ["LlamaForCausalLM"]}))
    tensors = lora_tensors(shapes, r=4)
    folder = write_adapter(tmp_path / "small", lora_config_dict(r=4), tensors)
    options = ("--adapters", "3", "--device", "cpu", "--dtype", "fp32", "--adapter", str(folder))
    [size] = plan_json(config, *options)["sizes"]
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    assert (size["name"], size["rank"], size["bytes"]) == ("small", 4, num_bytes)
    part = {"kind": "low rank", "modules": 6, "bytes": num_bytes, "token_bytes": num_bytes}
    assert size["parts"] == [part]
    seen = run_plan("--model", str(config), *options)
    assert seen.exit_code == 0 and "read per token" in seen.output
    refused = run_plan("--model", str(config), *options, "--rank", "8")
    assert refused.exit_code == 2 and "Leave --rank" in refused.output


def test_what_full_modules_cost_is_a_warning() -> None:
    assert "warning: big is expensive." in shown(3, warnings=["big is expensive."])
