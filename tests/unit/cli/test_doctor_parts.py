"""What `loramux doctor` says of each part: its kind, sizes, effect and cost, and of each field."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from loramux.adapters.packed.extras import MODEL_LEVEL, ExtraKind, ExtraSpec
from loramux.adapters.peft.doctor import Report, describe
from loramux.adapters.peft.effects import extra_norms
from loramux.adapters.peft.field_report import report_fields
from loramux.adapters.peft.parts import ExtraTensor
from loramux.adapters.peft.reader import CheckedAdapter, read_adapter
from loramux.capacity.plan import PlannedBase
from loramux.cli.costs import with_cost
from loramux.cli.doctor import show_report
from loramux.cli.main import app
from tests.adapter_factory import (
    lora_config_dict,
    lora_tensors,
    tiny_base_info,
    tiny_llama,
    tiny_llama_config,
    write_adapter,
)
from tests.packing_factory import spec_of

CONFIG = tiny_llama_config()
BASE = tiny_base_info(CONFIG)
PLANNED = PlannedBase(name="tiny", shapes=BASE, dtype="float32", block_tokens=64)
GENERATOR = torch.Generator().manual_seed(0)


def random(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=GENERATOR)


EXTRAS = (
    ExtraTensor((0, "qkv", ExtraKind.GAIN), random(1, 96)),
    ExtraTensor((1, "qkv", ExtraKind.GAIN), random(1, 96)),
    ExtraTensor((0, "o", ExtraKind.BIAS), random(1, 32)),
    ExtraTensor((MODEL_LEVEL, "lm_head", ExtraKind.WEIGHT), random(96, 32)),
    ExtraTensor((MODEL_LEVEL, "embed_tokens", ExtraKind.LOW_RANK_A), random(96, 4)),
    ExtraTensor((MODEL_LEVEL, "embed_tokens", ExtraKind.LOW_RANK_B), random(4, 32)),
)


@pytest.fixture
def adapter(tmp_path: Path) -> CheckedAdapter:
    return read_adapter(write_adapter(tmp_path, lora_config_dict(), lora_tensors(CONFIG)), BASE)


def rendered(report: Report) -> str:
    stream = io.StringIO()
    show_report(report, Console(file=stream, width=140))
    return stream.getvalue()


def test_effects_are_the_norms_of_the_deltas(adapter: CheckedAdapter) -> None:
    norms = {module.target.path: 10.0 for module in adapter.modules[:-1]}
    report = describe(adapter, BASE, weight_norms=lambda paths: norms)
    for module, found in zip(adapter.modules, report.modules, strict=True):
        expected = float(torch.linalg.matrix_norm(module.scale * module.b @ module.a))
        assert found.effect == pytest.approx(expected, rel=1e-5)
        assert found.file_bytes == module.a.nbytes + module.b.nbytes
    assert report.modules[0].relative == pytest.approx((report.modules[0].effect or 0) / 10)
    assert report.modules[-1].relative is None
    assert "|ΔW| / |W|" in rendered(report)


def test_low_rank_of_tables_counts_as_both_matrices_multiplied() -> None:
    norms = extra_norms(EXTRAS)
    delta = EXTRAS[4].values @ EXTRAS[5].values
    for part in EXTRAS[4:]:
        assert norms[part.key] == pytest.approx(float(delta.norm()), rel=1e-5)
    head = (
        ExtraTensor((MODEL_LEVEL, "lm_head", ExtraKind.LOW_RANK_A), random(4, 32)),
        ExtraTensor((MODEL_LEVEL, "lm_head", ExtraKind.LOW_RANK_B), random(96, 4)),
    )
    expected = float((head[1].values @ head[0].values).norm())
    assert list(extra_norms(head).values()) == pytest.approx([expected, expected], rel=1e-5)
    assert norms[EXTRAS[0].key] == pytest.approx(float(EXTRAS[0].values.norm()))


def test_parts_are_grouped_by_kind_with_their_bytes(adapter: CheckedAdapter) -> None:
    full = replace(adapter, extras=EXTRAS)
    rows = ExtraSpec(MODEL_LEVEL, "embed_tokens", ExtraKind.ROWS, 3, 32, (1, 2, 5))
    report = with_cost(describe(full, BASE, specs=[*map(spec_of, EXTRAS), rows]), PLANNED)
    assert report.cost is not None
    kinds = {one.kind: one for one in report.cost.kinds}
    assert {name: (one.modules, one.pool_bytes) for name, one in kinds.items()} == {
        "low rank": (6, adapter.size_bytes),
        "gain": (2, 2 * 96 * 4),
        "bias": (1, 32 * 4),
        "full weight": (1, 96 * 32 * 4),
        "low rank of embedding or head": (1, 4 * 128 * 4),
        "token rows": (1, 3 * 32 * 4),
    }
    assert kinds["low rank"].file_bytes == adapter.size_bytes
    assert (kinds["token rows"].file_bytes, kinds["token rows"].token_bytes) == (0, 32 * 4)
    assert report.cost.token_bytes == sum(one.token_bytes for one in report.cost.kinds)
    assert sum(one.pool_bytes for one in report.modules) == adapter.size_bytes
    [warning] = [text for text in report.warnings if "full weight" in text]
    text = rendered(report)
    assert f"warning: {warning}" in text
    [gain] = [line for line in text.splitlines() if "1 x 96" in line]
    assert "0-1" in gain and "qkv" in gain
    json.dumps(report.to_dict())


def test_every_field_is_classified() -> None:
    fields = {"r": 8, "lora_dropout": 0.1, "use_dora": False, "kasa_config": {}, "telepathy": True}
    refused = {one.name: one.status for one in report_fields(fields, is_served=False)}
    assert refused == {
        "kasa_config": "refused",
        "lora_dropout": "harmless",
        "r": "honoured",
        "telepathy": "refused",
        "use_dora": "honoured",
    }
    served = report_fields({"use_dora": True, "r": 8}, is_served=True)
    assert [one.status for one in served] == ["honoured", "honoured"]


def test_the_command_reports_fields_effects_and_cost(tmp_path: Path) -> None:
    model = tmp_path / "base"
    tiny_llama(CONFIG).save_pretrained(model)
    folder = write_adapter(tmp_path / "good", lora_config_dict(), lora_tensors(CONFIG))
    command = ["doctor", str(folder), "--model", str(model)]
    report = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert {one["status"] for one in report["fields"]} <= {"honoured", "harmless"}
    assert {"r", "target_modules"} <= {one["name"] for one in report["fields"]}
    assert all(0 < one["relative"] < 100 for one in report["modules"])
    assert report["cost"]["token_bytes"] == report["cost"]["kinds"][0]["token_bytes"] > 0
    assert report["cost"]["base_token_bytes"] > report["cost"]["token_bytes"]
    shown = CliRunner().invoke(app, [*command, "--no-probe"], env={"COLUMNS": "160"}).stdout
    assert "Fields   " in shown and "honoured (" in shown
    assert "a token reads" in shown and "|ΔW| / |W|" not in shown
    write_adapter(tmp_path / "bad", lora_config_dict(use_dora=True, use_qalora=True), None)
    bad = CliRunner().invoke(app, ["doctor", str(tmp_path / "bad"), "--model", str(model)])
    assert bad.exit_code == 1
    assert "refused: use_qalora pools" in bad.stdout
