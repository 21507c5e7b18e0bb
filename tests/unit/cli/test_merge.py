"""`loramux merge` and `loramux convert`: results, refusals and what is left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from loramux.adapters.peft.unbound import read_without_base
from loramux.cli.merge import one_weight_per_flag
from tests.adapter_factory import lora_config_dict, lora_tensors, tiny_llama_config, write_adapter
from tests.cli_factory import Shell

CONFIG = tiny_llama_config(num_hidden_layers=1)


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    return [
        write_adapter(
            tmp_path / f"part-{seed}", lora_config_dict(), lora_tensors(CONFIG, seed=seed)
        )
        for seed in range(2)
    ]


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("part-"))


def test_folders_are_merged_into_a_new_folder(shell: Shell, parts: list[Path]) -> None:
    out = shell.folder / "new" / "merged"
    result = shell.run_bare("merge", *parts, "--weights", "0.5", "-2", "--out", out)
    assert result.exit_code == 0, result.output
    found = read_without_base(out)
    first = [read_without_base(part).modules[0] for part in parts]
    expected = sum(w * m.scale * m.b @ m.a for w, m in zip((0.5, -2), first, strict=True))
    module = found.modules[0]
    torch.testing.assert_close(module.b @ module.a, expected)
    assert f"-2 * {parts[1]}" in result.stdout
    assert left_behind(out.parent) == ["merged"]
    assert not shell.data.exists()


def test_versions_of_the_registry_are_merged_into_a_version(
    shell: Shell, parts: list[Path]
) -> None:
    shell.ok("push", parts[0], "alice/a@1.0.0", "--alias", "prod")
    shell.ok("push", parts[1], "alice/b@1.0.0")
    words = ("--combination", "dare_ties", "--density", 0.5, "--seed", 3)
    output = shell.ok("merge", "alice/a@prod", parts[1], *words, "--push", "alice/ab@1.0.0")
    assert "Pushed   alice/ab@1.0.0" in output
    assert "1 * alice/a@1.0.0" in output
    details = shell.json("show", "alice/ab@1.0.0")["versions"][0]
    assert details["recipe"]["method"] == "dare_ties"
    assert {part["cid"] for part in details["recipe"]["parts"]} == {
        read_without_base(part).cid for part in parts
    }
    assert (
        "Method          dare_ties (density 0.5, majority_sign_method total, seed 3)"
        in shell.ok("show", "alice/ab@1.0.0")
    )
    again = shell.ok("merge", "alice/b", "alice/a", *words, "--push", "alice/ab@1.0.0")
    assert "Known    alice/ab@1.0.0" in again


def test_a_recipe_is_a_version_without_files(shell: Shell, parts: list[Path]) -> None:
    for name, part in zip("ab", parts, strict=True):
        shell.ok("push", part, f"alice/{name}@1.0.0")
    blobs = shell.blobs()
    weights = ("--weights", "1", "0.5")
    pushing = ("--push", "alice/ab@1.0.0", "--recipe")
    output = shell.ok("merge", "alice/a", "alice/b", *weights, *pushing)
    assert "Pushed   alice/ab@1.0.0" in output
    assert shell.blobs() == blobs
    [version] = shell.json("show", "alice/ab@1.0.0")["versions"]
    named = {part["name"]: part["weight"] for part in version["recipe"]["parts"]}
    assert named == {"alice/a@1.0.0": 1, "alice/b@1.0.0": 0.5}
    assert "0.5 * alice/b@1.0.0" in shell.ok("show", "alice/ab@1.0.0")
    listed = {one["name"]: one for one in shell.json("list")["adapters"]}
    assert listed["ab"]["versions"][0]["recipe"] == version["recipe"]
    assert "2 parts" in shell.ok("list")
    assert "1.0.0    = alice/a@1.0.0+0.5*alice/b@1.0.0" in shell.ok("show", "alice/ab")
    shell.ok("verify")
    refused = shell.run("rm", "alice/b@1.0.0")
    assert refused.exit_code == 1 and "recipe alice/ab@1.0.0" in refused.stderr
    shell.ok("gc", "--grace-s", 0)
    assert shell.blobs() == blobs
    for words in (("pull", "alice/ab", shell.folder / "out"), ("merge", "alice/ab", *parts)):
        refused = shell.run(*words, *(("--push", "alice/x") if words[0] == "merge" else ()))
        assert refused.exit_code == 2 and "is a recipe" in refused.stderr
    shell.ok("rm", "alice/ab@1.0.0")
    shell.ok("rm", "alice/b@1.0.0")
    shell.ok("gc", "--grace-s", 0)
    assert len(shell.blobs()) < len(blobs)


def test_the_parts_of_a_recipe_are_checked_before_it_is_stored(
    shell: Shell, parts: list[Path]
) -> None:
    wide = write_adapter(
        shell.folder / "wide", lora_config_dict(r=8), lora_tensors(CONFIG, seed=9, r=8)
    )
    shell.ok("push", parts[0], "alice/a@1.0.0")
    shell.ok("push", wide, "alice/wide@1.0.0")
    ties = ("--combination", "ties", "--density", 0.5)
    cases: list[tuple[tuple[object, ...], int, str]] = [
        (("alice/a", "alice/wide", *ties, "--push", "alice/x"), 1, "alice/wide@1.0.0"),
        (("alice/a", wide, "--push", "alice/x"), 2, "Push it first"),
        (("alice/a", "alice/wide", "--out", shell.folder / "out"), 2, "give --push"),
    ]
    for words, status, message in cases:
        result = shell.run("merge", *words, "--recipe")
        assert result.exit_code == status, result.output
        assert message in " ".join(result.stderr.split())
    assert [one["name"] for one in shell.json("list")["adapters"]] == ["a", "wide"]
    svd = ("--combination", "svd", "--push", "alice/x@1.0.0", "--recipe")
    assert "Pushed   alice/x@1.0.0" in shell.ok("merge", "alice/a", "alice/wide", *svd)


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["{0}", "{0}", "--out", "{out}"], 2, "same adapter"),
        (["{0}", "{1}", "--weights", "1", "--out", "{out}"], 2, "one weight for each"),
        (["{0}", "{1}", "--combination", "tied", "--out", "{out}"], 2, "Did you mean ties"),
        (["{0}", "{1}", "--combination", "ties", "--out", "{out}"], 2, "needs a density"),
        (["{0}", "{1}"], 2, "either --out DIR or --push"),
        (["{0}", "{1}", "--out", "{out}", "--push", "a/b"], 2, "either --out DIR or --push"),
        (["{0}", "{1}", "--push", "a/../b"], 2, "cannot be the name"),
        (["{0}", "--out", "{out}"], 2, "2 to 16 adapters"),
        (["{0}", "./absent", "--out", "{out}"], 1, "No adapter folder"),
        (["{0}", "alice/absent", "--out", "{out}"], 1, "no adapter of the registry"),
        (["{0}", "{1}", "--out", "{0}"], 2, "not an empty folder"),
        (["{0}", "{2}", "--combination", "linear", "--out", "{out}"], 1, "equal ranks"),
        (["{0}", "{3}", "--out", "{out}"], 1, "different bases"),
        (["{0}", "{4}", "--out", "{out}"], 1, "use_dora"),
    ],
)
def test_errors_name_the_reason_and_leave_nothing_behind(
    words: list[str], status: int, message: str, shell: Shell, parts: list[Path]
) -> None:
    tensors = lora_tensors(CONFIG, seed=7, r=2)
    fields = [
        lora_config_dict(r=2),
        lora_config_dict(r=2, base_model_name_or_path="other"),
        lora_config_dict(r=2, use_dora=True),
    ]
    for index, config in enumerate(fields, 2):
        parts.append(write_adapter(shell.folder / f"part-{index}", config, tensors))
    out = shell.folder / "merged"
    result = shell.run("merge", *(word.format(*parts, out=out) for word in words))
    assert result.exit_code == status, result.output
    assert message in " ".join(result.stderr.split())
    assert [name for name in left_behind(shell.folder) if name != "data"] == []


def test_a_failed_merge_removes_its_files(
    shell: Shell, parts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bytes:
        raise OSError("No space left on device")

    monkeypatch.setattr("loramux.adapters.peft.writer.safetensors_chunks", fail)
    abandoned = shell.folder / ".merged.loramux-0"
    abandoned.mkdir()
    result = shell.run_bare("merge", *parts, "--out", shell.folder / "merged")
    assert result.exit_code == 1
    assert "No space left" in result.stderr
    assert left_behind(shell.folder) == []


def test_weights_may_be_negative_and_stand_anywhere() -> None:
    args = ["a", "--weights", "1", "-0.5", "1e-3", "b", "--seed", "1", "--weights=2"]
    assert one_weight_per_flag(args) == [
        "a",
        "--weights=1",
        "--weights=-0.5",
        "--weights=1e-3",
        "b",
        "--seed",
        "1",
        "--weights=2",
    ]


def test_convert_states_what_it_changed(shell: Shell) -> None:
    tensors = {f"module.{n}": t.double() for n, t in lora_tensors(CONFIG).items()}
    source = write_adapter(shell.folder / "part-old", lora_config_dict(), tensors)
    out = shell.folder / "part-new"
    result = shell.run_bare("convert", source, "--out", out, "--dtype", "float16")
    assert result.exit_code == 0, result.output
    assert "training wrappers" in result.stdout
    assert "float64 tensors to float16" in result.stdout
    assert read_without_base(out).cid in result.stdout
    again = shell.run_bare("convert", out, "--out", shell.folder / "part-same")
    assert "Nothing had to be changed" in again.stdout
    assert json.loads((out / "adapter_config.json").read_text()) == lora_config_dict()
    for words, status in (
        ([source, "--out", out], 2),
        ([source, "--out", shell.folder / "x", "--dtype", "int4"], 2),
        ([shell.folder / "absent", "--out", shell.folder / "x"], 1),
    ):
        assert shell.run_bare("convert", *words).exit_code == status
    assert left_behind(shell.folder) == []
