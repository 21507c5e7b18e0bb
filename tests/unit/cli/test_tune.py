from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from loramux.cli.main import app
from loramux.runner import tune
from loramux.runner.device_choice import DeviceChoice
from loramux.runner.gemm.table import TunedGemm, TunedTable, read_table, user_table_file


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LORAMUX_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "vocab_size": 100,
            }
        )
    )

    def tune_model(config: Any, device: torch.device, options: Any, progress: Any) -> TunedTable:
        progress("Tuning qkv", 0.5)
        table = TunedTable("gpu", 7)
        table.add(
            [
                TunedGemm(
                    first_m=1,
                    m=2,
                    n=config.hidden_size,
                    k=options.augmented_ranks,
                    dtype=options.dtype,
                )  # fmt: skip
            ]
        )
        return table

    monkeypatch.setattr(tune, "tune_model", tune_model)
    return file


def test_table_goes_to_the_cache_folder_and_other_models_stay(model: Path) -> None:
    for ranks in ("16", "32"):
        command = ["tune", "--model", str(model), "--lora-augmented-ranks", ranks]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        assert "1 GEMM shapes" in result.output
    table = read_table(user_table_file("gpu", 7))
    assert table is not None
    assert [entry.k for entry in table.entries()] == [16, 32]


def test_output_file(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    command = ["tune", "--model", str(model), "--dtype", "float16", "--output", str(file)]
    assert CliRunner().invoke(app, command).exit_code == 0
    table = read_table(file)
    assert table is not None and table.entries()[0].dtype == torch.float16
    assert not user_table_file("gpu", 7).exists()


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [(["--dtype", "int8"], 2, "Valid values"), (["--model", "/no/such"], 1, "does not exist")],
)
def test_refusals(model: Path, arguments: list[str], code: int, text: str) -> None:
    result = CliRunner().invoke(app, ["tune", "--model", str(model), *arguments])
    assert result.exit_code == code and text in result.output


def test_a_gpu_that_cannot_be_used_is_an_error_with_the_reason(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = DeviceChoice(device="cpu", reason="torch is built without CUDA.")
    monkeypatch.setattr("loramux.runner.device_choice.choose_device", lambda device: choice)
    result = CliRunner().invoke(app, ["tune", "--model", str(model)])
    assert result.exit_code == 1 and "torch is built without CUDA" in result.output
    monkeypatch.undo()
    result = CliRunner().invoke(app, ["tune", "--model", str(model), "--device", "cuda:7"])
    assert result.exit_code == 1 and "cuda:7 cannot be used" in result.output
