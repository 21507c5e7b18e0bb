"""Determinism, refusals and the written files of combinations."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loramux.adapters.combine.combine import RECIPE_NAME, combine, write_combined
from loramux.adapters.combine.methods import cut_delta
from loramux.adapters.combine.pruning import keep_largest, random_mask
from loramux.adapters.packed.extras import ExtraKind
from loramux.adapters.peft.doctor import examine
from loramux.adapters.peft.parts import ExtraTensor
from loramux.adapters.peft.reader import CheckedAdapter
from loramux.adapters.peft.unbound import read_without_base
from loramux.adapters.recipe import METHODS, CombinationOptions, decode_recipe, make_recipe
from loramux.errors import AdapterRefused
from tests.adapter_factory import (
    lora_config_dict,
    lora_tensors,
    tiny_base_info,
    tiny_llama_config,
    write_adapter,
)

CONFIG = tiny_llama_config(num_hidden_layers=2)


def make_part(
    folder: Path, seed: int, *, r: int = 4, names: tuple[str, ...] = ("q_proj",), **fields: Any
) -> CheckedAdapter:
    config = lora_config_dict(r=r, target_modules=list(names), **fields)
    return read_without_base(
        write_adapter(folder, config, lora_tensors(CONFIG, seed=seed, r=r, names=names))
    )


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[CheckedAdapter]:
    root = tmp_path_factory.mktemp("parts")
    return [make_part(root / str(seed), seed) for seed in range(3)]


def write(
    folder: Path, parts: list[CheckedAdapter], weights: list[float], **options: Any
) -> dict[str, bytes]:
    recipe = make_recipe([part.cid for part in parts], weights, CombinationOptions(**options))
    folder.mkdir()
    write_combined(folder, combine(recipe, {part.cid: part for part in parts}))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def parameters(method: str) -> dict[str, Any]:
    return {"method": method} | ({} if METHODS[method].pruning == "none" else {"density": 0.5})


def test_an_adapter_with_parts_beside_low_rank_is_refused(parts: list[CheckedAdapter]) -> None:
    extra = ExtraTensor((0, "qkv", ExtraKind.BIAS), torch.ones(1, 96))
    recipe = make_recipe([part.cid for part in parts[:2]], [1.0, 1.0], CombinationOptions())
    for change in ({"extras": (extra,)}, {"only_alone": "it replaces lm_head"}):
        changed: Any = dataclasses.replace(parts[1], **change)
        with pytest.raises(AdapterRefused, match="more than|replaces") as refused:
            combine(recipe, {parts[0].cid: parts[0], parts[1].cid: changed})
        assert refused.value.code == "only_alone"


@pytest.mark.parametrize("method", METHODS)
def test_the_order_of_the_parts_does_not_change_a_byte(
    method: str, parts: list[CheckedAdapter], tmp_path: Path
) -> None:
    weights = [0.5, -1.0, 2.0]
    written = {
        tuple(
            sorted(
                write(
                    tmp_path / "".join(map(str, order)),
                    [parts[i] for i in order],
                    [weights[i] for i in order],
                    **parameters(method),
                ).items()
            )
        )
        for order in itertools.permutations(range(3))
    }
    assert len(written) == 1


def test_dare_depends_on_the_seed_and_not_on_the_number_of_threads(
    parts: list[CheckedAdapter], tmp_path: Path
) -> None:
    options = {"method": "dare_ties_svd", "density": 0.5, "seed": 3}
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = write(tmp_path / "one", parts, [1, 1, 1], **options)
    finally:
        torch.set_num_threads(before)
    assert write(tmp_path / "same", parts, [1, 1, 1], **options) == one
    other = write(tmp_path / "other", parts, [1, 1, 1], **options | {"seed": 4})
    assert other["adapter_model.safetensors"] != one["adapter_model.safetensors"]


def test_the_masks_of_dare_never_change() -> None:
    bits = random_mask(4096, 0.3, bytes(range(32)))
    digest = hashlib.sha256(bytes(bits.to(torch.uint8).tolist())).hexdigest()
    assert digest == "37feb368590573a78260d358ac49d633e1b1682a526378733af975643583b7d5"
    assert 0.27 < bits.float().mean() < 0.33


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=30), st.floats(0.01, 1))
def test_pruning_keeps_the_largest_and_of_equal_ones_the_first(
    values: list[int], density: float
) -> None:
    kept = keep_largest(torch.tensor(values, dtype=torch.float64), density)
    order = sorted(range(len(values)), key=lambda index: (-abs(values[index]), index))
    chosen = set(order[: int(density * len(values))])
    assert kept.tolist() == [v if i in chosen else 0 for i, v in enumerate(values)]


@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (6, 6)])
def test_a_cut_is_the_best_approximation(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
    for rank in (1, 3, 9):
        cut = cut_delta(matrix, rank)
        expected = (left[:, :rank] * sizes[:rank]) @ right[:rank]
        torch.testing.assert_close(cut.b @ cut.a, expected)
    assert not cut_delta(torch.zeros(shape, dtype=torch.float64), 2).b.any()


def test_the_recipe_is_kept_in_the_weights_file(
    parts: list[CheckedAdapter], tmp_path: Path
) -> None:
    write(tmp_path / "merged", parts, [1, 2, -1], method="ties", density=0.5)
    report = examine(tmp_path / "merged", tiny_base_info(CONFIG))
    assert report.recipe is not None
    recipe = decode_recipe(json.dumps(report.recipe))
    assert [part.cid for part in recipe.parts] == sorted(part.cid for part in parts)
    beside = json.loads((tmp_path / "merged" / RECIPE_NAME).read_text())
    assert beside["cid"] == recipe.cid
    assert examine(parts[0].path, tiny_base_info(CONFIG)).recipe is None


def test_a_config_selects_only_the_modules_that_have_tensors(tmp_path: Path) -> None:
    some = make_part(tmp_path / "a", 0, names=("q_proj", "v_proj"))
    regex = ".*layers.1.*(k|o)_proj"
    tensors = lora_tensors(CONFIG, seed=1, names=("k_proj", "o_proj"))
    in_layer_1 = {name: tensor for name, tensor in tensors.items() if "layers.1" in name}
    other = read_without_base(
        write_adapter(tmp_path / "b", lora_config_dict(target_modules=regex), in_layer_1)
    )
    write(tmp_path / "merged", [some, other], [1, 1])
    config = json.loads((tmp_path / "merged" / "adapter_config.json").read_text())
    assert len(config["target_modules"]) == 6
    assert examine(tmp_path / "merged", tiny_base_info(CONFIG)).ok


def test_a_module_without_effect_is_left_out(tmp_path: Path) -> None:
    parts = [make_part(tmp_path / n, s, names=(n,)) for s, n in enumerate(("q_proj", "o_proj"))]
    write(tmp_path / "merged", parts, [1, 0])
    found = read_without_base(tmp_path / "merged")
    assert {module.target.projection for module in found.modules} == {"q_proj"}
    assert examine(tmp_path / "merged", tiny_base_info(CONFIG)).ok


def test_16_bit_inputs_and_results(tmp_path: Path) -> None:
    parts = []
    for seed, dtype in enumerate((torch.bfloat16, torch.float16)):
        tensors = {k: v.to(dtype) for k, v in lora_tensors(CONFIG, seed=seed).items()}
        folder = write_adapter(tmp_path / str(seed), lora_config_dict(), tensors)
        parts.append(read_without_base(folder))
    write(tmp_path / "merged", parts, [1, 1], dtype="bfloat16")
    found = read_without_base(tmp_path / "merged")
    assert {module.a.dtype for module in found.modules} == {torch.bfloat16}
    first = found.modules[0]
    expected = sum(
        p.modules[0].scale * p.modules[0].b.float() @ p.modules[0].a.float() for p in parts
    )
    torch.testing.assert_close(first.b.float() @ first.a.float(), expected, rtol=0.02, atol=0.05)


def refused(parts: list[CheckedAdapter], weights: list[float], **options: Any) -> AdapterRefused:
    recipe = make_recipe([part.cid for part in parts], weights, CombinationOptions(**options))
    with pytest.raises(AdapterRefused) as caught:
        combine(recipe, {part.cid: part for part in parts})
    assert caught.value.fix
    return caught.value


def test_unequal_ranks_are_refused_where_elements_are_added(
    parts: list[CheckedAdapter], tmp_path: Path
) -> None:
    other = make_part(tmp_path / "other", 9, r=2)
    for method, found in METHODS.items():
        if found.needs_equal_ranks:
            error = refused([parts[0], other], [1, 1], **parameters(method))
            assert error.code == "unequal_ranks"
            assert "rank 4 in" in error.reason or "and 4 in" in error.reason
            assert "cat" in error.fix


def test_other_bases_are_refused(parts: list[CheckedAdapter], tmp_path: Path) -> None:
    renamed = make_part(tmp_path / "renamed", 8, base_model_name_or_path="someone/gpt")
    assert refused([parts[0], renamed], [1, 1]).code == "other_base"
    unnamed = make_part(tmp_path / "unnamed", 8, base_model_name_or_path=None)
    cids = [parts[0].cid, renamed.cid]
    by_cid = {part.cid: part for part in (parts[0], renamed)}
    assert combine(make_recipe(cids), by_cid, any_base=True).max_rank == 8
    assert combine(
        make_recipe([parts[0].cid, unnamed.cid]), {parts[0].cid: parts[0], unnamed.cid: unnamed}
    )
    wider = tiny_llama_config(num_hidden_layers=2, hidden_size=48)
    tensors = lora_tensors(wider, names=("q_proj",))
    folder = write_adapter(tmp_path / "wide", lora_config_dict(target_modules=["q_proj"]), tensors)
    assert refused([parts[0], read_without_base(folder)], [1, 1]).code == "wrong_shape"


def test_a_result_without_effect_or_out_of_range_is_refused(parts: list[CheckedAdapter]) -> None:
    assert refused(parts, [1, 1, 1], method="ties", density=0.001).code == "no_effect"
    assert refused(parts, [1e30, 1, 1], dtype="float16").code == "not_finite"
