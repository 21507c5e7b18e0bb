"""Merged linears against exact sums, against the unmerged engine, and against PEFT."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loramux.engine.engine import Engine
from loramux.lora.merge import MergedWeights, MergeSource, PageDeltas
from loramux.models.layers import Linear
from loramux.models.packed_linear import PackedLinear
from loramux.types.request import Selection
from tests.adapter_factory import make_peft_adapter
from tests.engine_factory import cpu_runner, make_engine, make_prompt, peft_logits
from tests.model_factory import tiny_transformers_model
from tests.unit.lora.test_stacks import SITES, Shelf

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "all-linear": {"r": 8, "target_modules": ALL_LINEAR},
    "attention": {"r": 4, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
    "ranks": {
        "r": 3,
        # With a larger scale at rank 1, float32 itself is 1e-4 to 2e-4 away from float64.
        "lora_alpha": 2,
        "rank_pattern": {"o_proj": 1, "k_proj": 7},
        "target_modules": ALL_LINEAR,
    },
    "one layer": {"r": 8, "target_modules": ["down_proj"], "layers_to_transform": [1]},
}
ENGINES: dict[str, dict[str, Any]] = {
    "packed": {},
    "plain": {"pack_weights": False},
    "reference": {"reference_kernels": True},
}


def source_of(engine: Engine) -> MergeSource:
    return MergeSource(
        bases=cpu_runner(engine)._lora.bases,
        deltas=cpu_runner(engine).deltas,
    )


def base_digest(engine: Engine) -> str:
    """Return a digest of every weight that a forward without adapters reads."""
    digest = hashlib.sha256()
    for name, tensor in sorted(cpu_runner(engine)._decoder.state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    for module in cpu_runner(engine)._decoder.modules():
        if isinstance(module, PackedLinear):
            if module.matrix is not None:
                digest.update(module.matrix.panels.tobytes())
            else:
                digest.update(module.packed.to_dense().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def build(source: MergeSource, selection: Selection) -> MergedWeights:
    weights = MergedWeights(source, selection)
    weights.advance(lambda: True)
    assert weights.is_complete
    return weights


def shelf_source(shelf: Shelf, *adapters: Any, dtype: torch.dtype = torch.float32) -> MergeSource:
    bases: dict[tuple[int, str], nn.Module] = {}
    for layer in range(2):
        for site in SITES:
            linear = Linear(site.in_features, sum(site.out_features), bias=True, dtype=dtype)
            for parameter in linear.parameters():
                parameter.copy_(torch.randn(parameter.shape))
            bases[layer, site.name] = linear
    resident = {adapter.cid: adapter for adapter in adapters}
    return MergeSource(bases=bases, deltas=PageDeltas(resident, shelf.pages))


def exact_delta(shelf: Shelf, adapter: Any, site: tuple[int, str]) -> Tensor:
    """[out, in] in float64, from the adapter's flat buffer."""
    place, flat = adapter.layout.places[site], shelf.buffers[adapter.cid].double()
    out_features = next(sum(s.out_features) for s in SITES if s.name == site[1])
    delta = torch.zeros(out_features, place.in_features, dtype=torch.float64)
    size = place.in_features * place.total_rank
    a = flat[place.a_offset :][:size].view(place.in_features, place.total_rank)
    for piece in place.slices:
        b = flat[piece.offset :][: piece.rank * piece.out_features].view(piece.rank, -1)
        part = a[:, piece.rank_start : piece.rank_start + piece.rank] @ b
        delta[piece.out_start : piece.out_start + piece.out_features] += part.t()
    return delta


def test_a_merged_weight_is_the_exact_sum_of_base_and_scaled_adapters() -> None:
    """Slices with a gap between them, sites that begin inside a page, two adapters at once."""
    shelf = Shelf()
    first = shelf.adapter("a", {(0, "q"): 3, (0, "v"): 5, (1, "o"): 2})
    second = shelf.adapter("b", {(0, "k"): 7, (1, "q"): 1, (1, "o"): 4})
    source = shelf_source(shelf, first, second)
    weights = build(source, (("a", 0.5), ("b", -2.0)))
    assert list(weights.sites) == [(0, "qkv"), (1, "o"), (1, "qkv")]
    for site, merged in weights.sites.items():
        expected = source.bases[site].weight.double()
        for adapter, scale in ((first, 0.5), (second, -2.0)):
            if site in adapter.layout.places:
                expected = expected + scale * exact_delta(shelf, adapter, site)
        torch.testing.assert_close(merged.weight.double(), expected, atol=1e-5, rtol=1e-5)
        assert merged.bias is source.bases[site].bias


def test_a_low_precision_weight_is_rounded_once() -> None:
    """Adding in bfloat16 would round the adapter away before it is added."""
    shelf = Shelf()
    adapter = shelf.adapter("a", {(0, "o"): 4})
    source = shelf_source(shelf, adapter, dtype=torch.bfloat16)
    (merged,) = build(source, (("a", 0.01),)).sites.values()
    exact = source.bases[0, "o"].weight.double() + 0.01 * exact_delta(shelf, adapter, (0, "o"))
    assert merged.weight.dtype == torch.bfloat16
    error = (merged.weight.double() - exact).abs()
    assert (error <= exact.abs() * 2**-8).all()


def test_one_call_makes_one_site_unless_it_may_go_on() -> None:
    shelf = Shelf()
    adapter = shelf.adapter("a", {(0, "q"): 1, (0, "o"): 1, (1, "q"): 1, (1, "o"): 1})
    weights = MergedWeights(shelf_source(shelf, adapter), (("a", 1.0),))
    weights.advance(lambda: False)
    assert len(weights.sites) == 1 and not weights.is_complete
    answers = iter([True, False])
    weights.advance(lambda: next(answers))
    assert len(weights.sites) == 3 and not weights.is_complete
    weights.advance(lambda: True)
    weights.advance(lambda: pytest.fail("it is complete"))
    assert len(weights.sites) == 4 and weights.is_complete


def test_what_has_no_merged_form_is_known_before_anything_is_made() -> None:
    shelf = Shelf()
    adapter = shelf.adapter("a", {(0, "q"): 1, (1, "o"): 1})
    source = shelf_source(shelf, adapter)
    assert source.num_bytes((("a", 1.0),)) == (8 * 4 + 4 * 4) * 4
    assert source.num_bytes(()) is None
    assert source.num_bytes((("a", 1.0), ("gone", 1.0))) is None


@pytest.fixture(scope="module", params=["llama", "llama31"])
def model(request: pytest.FixtureRequest) -> Any:
    """Return the second has biases, which a merged copy must keep."""
    return tiny_transformers_model(request.param)


@pytest.fixture(scope="module", params=ENGINES)
def engine(
    request: pytest.FixtureRequest, model: Any, tmp_path_factory: pytest.TempPathFactory
) -> Engine:
    folder = tmp_path_factory.mktemp("model")
    return make_engine(model, folder, **ENGINES[request.param])


def merged_logits(engine: Engine, weights: MergedWeights, tokens: tuple[int, ...]) -> Tensor:
    context = cpu_runner(engine)._lora
    context.merged = weights.sites
    try:
        return engine.prompt_logits([(tokens, weights.selection)])[0]
    finally:
        context.merged = None


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to True")
@pytest.mark.parametrize("length", [1, 23])
@pytest.mark.parametrize("name", ADAPTERS)
def test_merged_logits_equal_the_unmerged_ones_and_the_base_keeps_its_bits(
    name: str, length: int, engine: Engine, model: Any, tmp_path: Path
) -> None:
    """One row reads the plain weight, more rows the packed one: both must be merged."""
    tokens, before = make_prompt(length, seed=4), base_digest(engine)
    folder = make_peft_adapter(tmp_path, model, seed=1, **ADAPTERS[name])
    selection = ((engine.register_adapter(folder).cid, 1.0),)
    (base,) = engine.prompt_logits([(tokens, ())])
    (unmerged,) = engine.prompt_logits([(tokens, selection)])
    weights = build(source_of(engine), selection)
    for _ in range(2):
        merged = merged_logits(engine, weights, tokens)
        torch.testing.assert_close(merged, unmerged, atol=1e-4, rtol=1e-4)
        (again,) = engine.prompt_logits([(tokens, selection)])
        (base_again,) = engine.prompt_logits([(tokens, ())])
        assert torch.equal(again, unmerged) and torch.equal(base_again, base)
    expected = peft_logits(model, folder, tokens)
    torch.testing.assert_close(merged, expected, atol=1e-4, rtol=1e-4)
    assert (merged - base).abs().max() > 1e-2
    assert base_digest(engine) == before


def test_the_counted_bytes_are_those_that_are_held(
    engine: Engine, model: Any, tmp_path: Path
) -> None:
    folder = make_peft_adapter(tmp_path, model, seed=2, **ADAPTERS["ranks"])
    selection = ((engine.register_adapter(folder).cid, 1.0),)
    engine.prompt_logits([((5,), selection)])
    weights = build(source_of(engine), selection)
    held = 0
    for site, module in weights.sites.items():
        base = source_of(engine).bases[site]
        weight = module.dequantised_rows()
        assert type(module) is type(base)
        assert weight.data_ptr() != base.dequantised_rows().data_ptr()
        held += weight.nbytes * (2 if isinstance(module, PackedLinear) else 1)
    assert weights.num_bytes == held > 0
