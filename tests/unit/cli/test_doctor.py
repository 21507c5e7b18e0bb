"""`loramux doctor`: verdicts, exit status and report."""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save
from typer.testing import CliRunner, Result

from loramux.adapters.peft.doctor import ModuleReport, Refusal, Report
from loramux.base.signing import make_key_files
from loramux.cli.console import size_text
from loramux.cli.doctor import layer_ranges, show_report
from loramux.cli.main import app
from tests.adapter_factory import (
    lora_config_dict,
    lora_tensors,
    tiny_llama,
    tiny_llama_config,
    write_adapter,
)
from tests.kinds_factory import make_kind

CONFIG = tiny_llama_config()
TENSORS = lora_tensors(CONFIG)
FIRST_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny_llama(CONFIG).save_pretrained(folder)
    return folder


def run_doctor(folder: Path, base: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["doctor", str(folder), "--model", str(base), *options])


def test_signatures_in_the_folder_are_counted_and_checked(tmp_path: Path, base: Path) -> None:
    folder, key = (
        write_adapter(tmp_path / "adapter", lora_config_dict(), save(TENSORS)),
        tmp_path / "key.pem",
    )
    make_key_files(key)
    make_key_files(tmp_path / "other.pem")
    signer, other = ["--signer", f"{key}.pub"], ["--signer", str(tmp_path / "other.pem.pub")]
    plain = ["--no-probe", "--json"]
    refused = run_doctor(folder, base, *plain, *signer)
    assert refused.exit_code == 1
    assert json.loads(refused.stdout)["refusal"]["code"] == "bad_signature"
    CliRunner().invoke(app, ["sign", str(folder), "--key", str(key)])
    counted = json.loads(run_doctor(folder, base, *plain).stdout)
    assert (counted["num_signatures"], counted["signed_by"]) == (1, None)
    checked = run_doctor(folder, base, *plain, *other, *signer)
    assert checked.exit_code == 0 and len(json.loads(checked.stdout)["signed_by"]) == 16
    assert run_doctor(folder, base, *plain, *other).exit_code == 1


def changed(name: str, tensor: torch.Tensor) -> Tensors:
    return {**TENSORS, name: tensor}


def without(name: str) -> Tensors:
    return {key: tensor for key, tensor in TENSORS.items() if key != name}


def safetensors_with_header(header: bytes, length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header


def leave_pickle(folder: Path) -> None:
    write_adapter(folder, lora_config_dict(), None)
    (folder / "adapter_model.bin").write_bytes(pickle.dumps({}))


def with_config(**fields: Any) -> Callable[[Path], object]:
    return lambda folder: write_adapter(folder, lora_config_dict(**fields), TENSORS)


def with_tensors(tensors: Tensors | bytes | None) -> Callable[[Path], object]:
    return lambda folder: write_adapter(folder, lora_config_dict(), tensors)


SECOND_BASE = lora_tensors(tiny_llama_config(hidden_size=48))
NAN = torch.full((4, 32), math.nan)
BROKEN: dict[str, Callable[[Path], object]] = {
    "not_found": lambda folder: None,
    "config_missing": lambda folder: write_adapter(folder, None, TENSORS),
    "config_not_json": lambda folder: write_adapter(folder, "{'r': 8}", TENSORS),
    "not_lora": with_config(peft_type="PREFIX_TUNING"),
    "unknown_field": with_config(use_telepathy=True),
    "unsupported_field": with_config(use_qalora=True),
    "wrong_type": with_config(r="8"),
    "bad_value": with_config(r=0),
    "bad_pattern": with_config(target_modules="(q_proj"),
    "no_targets": with_config(target_modules=["query"]),
    "weights_missing": with_tensors(None),
    "pickle": leave_pickle,
    "truncated": with_tensors(save(TENSORS)[:-64]),
    "oversized_header": with_tensors(safetensors_with_header(b"{", length=2**60)),
    "broken_safetensors": with_tensors(safetensors_with_header(b'{"a": nonsense}')),
    "unknown_tensors": with_tensors(changed("base_model.model.extra", torch.ones(2))),
    "incomplete_pair": with_tensors(without(FIRST_A)),
    "wrong_shape": with_tensors(SECOND_BASE),
    "wrong_rank": with_config(r=6),
    "not_finite": with_tensors(changed(FIRST_A, NAN)),
    "no_effect": with_tensors({name: torch.zeros_like(t) for name, t in TENSORS.items()}),
}


@pytest.mark.parametrize("code", BROKEN)
def test_each_kind_of_broken_adapter_is_refused_for_its_own_reason(
    code: str, base: Path, tmp_path: Path
) -> None:
    BROKEN[code](tmp_path / "adapter")
    result = run_doctor(tmp_path / "adapter", base)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), "a traceback would have been shown"
    assert f"REFUSED ({code}): " in result.stdout
    assert "OK:" not in result.stdout


@pytest.mark.parametrize("shape", [[2**62], [2**62, 2**62], [2**62, 0]])
def test_a_tensor_of_an_absurd_shape_is_refused_without_a_traceback(
    shape: list[int], base: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "adapter", lora_config_dict(), TENSORS)
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    content = safetensors_with_header(json.dumps({FIRST_A: entry}).encode())
    (folder / "adapter_model.safetensors").write_bytes(content)
    result = run_doctor(folder, base)
    assert isinstance(result.exception, SystemExit) and "REFUSED" in result.stdout


def test_a_good_adapter_is_measured_and_described_in_json(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "good", lora_config_dict(), TENSORS)
    result = run_doctor(folder, base, "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["ok"] is True
    assert report["base"] == "tiny-llama"
    assert report["cid"].startswith("cidv1:sha256:")
    assert report["tensors_used"] == len(TENSORS)
    assert report["size_bytes"] == sum(tensor.nbytes for tensor in TENSORS.values())
    assert {(module["rank"], module["scale"]) for module in report["modules"]} == {(4, 2.0)}
    assert report["max_logit_change"] > 0


def test_without_the_probe_the_base_needs_no_weights(base: Path, tmp_path: Path) -> None:
    bare = tmp_path / "tiny-llama"
    bare.mkdir()
    (bare / "config.json").write_bytes((base / "config.json").read_bytes())
    folder = write_adapter(tmp_path / "good", lora_config_dict(), TENSORS)
    result = run_doctor(folder, bare, "--no-probe")
    assert result.exit_code == 0, result.output
    assert "not measured" in result.stdout
    failed = run_doctor(folder, bare)
    assert failed.exit_code == 1
    assert "REFUSED (probe_failed): " in failed.stdout


def test_refusal_in_json_is_the_only_thing_on_stdout(base: Path, tmp_path: Path) -> None:
    result = run_doctor(tmp_path / "nothing", base, "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["ok"] is False
    assert report["refusal"]["code"] == "not_found"


def test_strict_base_turns_the_warning_into_a_refusal(base: Path, tmp_path: Path) -> None:
    config = lora_config_dict(base_model_name_or_path="someone/other-model")
    folder = write_adapter(tmp_path / "other", config, TENSORS)
    lenient = run_doctor(folder, base, "--no-probe")
    assert lenient.exit_code == 0
    assert "warning: " in lenient.stdout
    strict = run_doctor(folder, base, "--no-probe", "--strict-base")
    assert strict.exit_code == 1
    assert "REFUSED (other_base): " in strict.stdout


def test_the_rank_cap_includes_its_limit(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "good", lora_config_dict(), TENSORS)
    assert run_doctor(folder, base, "--no-probe", "--max-rank", "4").exit_code == 0
    refused = run_doctor(folder, base, "--no-probe", "--max-rank", "3")
    assert refused.exit_code == 1
    assert "REFUSED (rank_over_cap): " in refused.stdout


def write_unknown_architecture(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"architectures": ["TelepathyForCausalLM"]}))


BAD_MODELS: dict[str, Callable[[Path], object]] = {
    "missing folder": lambda path: None,
    "empty folder": lambda path: path.mkdir(),
    "a file that is no model": lambda path: path.write_text("hello"),
    "unknown architecture": write_unknown_architecture,
}


@pytest.mark.parametrize("kind", BAD_MODELS)
def test_a_bad_model_path_is_named_without_a_traceback(kind: str, tmp_path: Path) -> None:
    BAD_MODELS[kind](tmp_path / "model")
    folder = write_adapter(tmp_path / "good", lora_config_dict(), TENSORS)
    result = run_doctor(folder, tmp_path / "model")
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert "REFUSED (unsupported_model): " in result.stdout


@pytest.mark.parametrize("content", [b"", b"hello", b"GGUF" + b"\xff" * 64])
def test_a_broken_gguf_file_is_named_without_a_traceback(content: bytes, tmp_path: Path) -> None:
    model = tmp_path / "broken.gguf"
    model.write_bytes(content)
    folder = write_adapter(tmp_path / "good", lora_config_dict(), TENSORS)
    result = run_doctor(folder, model)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert "REFUSED (unsupported_model): " in result.stdout


def rendered(report: Report, **console: Any) -> str:
    stream = io.StringIO()
    show_report(report, Console(file=stream, width=80, **console))
    return stream.getvalue()


def module(layer: int, name: str = "self_attn.q_proj", *, rank: int = 8) -> ModuleReport:
    path = f"model.layers.{layer}.{name}"
    return ModuleReport(path=path, rank=rank, alpha=16, scale=16 / rank, dtype="float32")


def served(**facts: Any) -> Report:
    cid = "cidv1:sha256:" + "0" * 64
    return Report(**{"folder": "f", "base": "b", "cid": cid, "size_bytes": 2048, **facts})


@pytest.mark.parametrize(
    ("layers", "text"),
    [([], ""), ([4], "4"), ([2, 0, 1], "0-2"), ([0, 1, 3, 5, 6, 7], "0-1, 3, 5-7")],
)
def test_layers_are_written_as_ranges_without_losing_any(layers: list[int], text: str) -> None:
    assert layer_ranges(layers) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(1023, "1023 bytes"), (1024, "1 KiB"), (3 * 2**19, "1.5 MiB"), (2**41, "2048 GiB")],
)
def test_sizes_change_unit_at_powers_of_1024(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text


def test_equal_layers_share_a_row_and_a_different_rank_gets_its_own() -> None:
    modules = (*(module(i) for i in range(30)), module(30, rank=4), module(0, "mlp.up_proj"))
    rows = [line for line in rendered(served(modules=modules)).splitlines() if "proj" in line]
    cells = [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]
    assert cells == [
        ["self_attn.q_proj", "0-29", "8", "16", "2", "float32"],
        ["self_attn.q_proj", "30", "4", "16", "4", "float32"],
        ["mlp.up_proj", "0", "8", "16", "2", "float32"],
    ]


def test_facts_stay_on_one_line_each_so_that_they_can_be_copied() -> None:
    warning = "long " * 30
    lines = rendered(served(warnings=(warning,), max_logit_change=1.5)).splitlines()
    assert f"CID      {served().cid}" in lines
    assert f"warning: {warning}" in lines
    assert "Logits   change by up to 1.5 on fixed tokens" in lines
    assert lines[-1] == "OK: this adapter can be served."


def test_unused_tensors_are_named_and_a_flood_of_them_is_cut() -> None:
    unused = tuple(f"t{i}" for i in range(20))
    text = rendered(served(tensors_used=4, tensors_unused=unused))
    assert "4 used, 20 unused: t0, t1, t2, t3, t4, t5, t6, t7 and 12 more" in text


def test_a_refusal_shows_code_reason_and_fix_and_never_ok() -> None:
    report = Report(folder="f", base="b", refusal=Refusal("wrong_shape", "Too wide.", "Narrow it."))
    lines = rendered(report).splitlines()
    assert lines[-2:] == ["REFUSED (wrong_shape): Too wide.", "Fix: Narrow it."]
    assert "OK" not in "".join(lines)


def test_names_from_an_adapter_cannot_steer_the_terminal_or_the_markup() -> None:
    text = rendered(served(folder="a\x1b[2J\r[red]b"), force_terminal=True)
    assert "\x1b[2J" not in text
    assert "\r" not in text
    assert "[red]b" in text


def test_the_verdict_has_a_colour_on_a_terminal() -> None:
    assert "\x1b[1;32mOK: " in rendered(served(), force_terminal=True, color_system="standard")


@pytest.mark.parametrize("kind", ["dora", "added_tokens"])
def test_parts_beside_low_rank_are_measured(kind: str, base: Path, tmp_path: Path) -> None:
    model = tiny_llama(CONFIG)
    model.name_or_path = "tiny-llama"
    folder = make_kind(kind, model, tmp_path / kind)
    result = run_doctor(folder, base, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert 0 < report["max_logit_change"] < math.inf
    assert report["parts"] and all(part["effect"] > 0 for part in report["parts"])
