"""DoRA: rows of a mixed batch against diffusers and PEFT; other files against scaled weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from loramux.diffusion.dora import dora_factors, dora_rows
from loramux.diffusion.engine import ImageEngine
from loramux.diffusion.lora_files.names import PipelineNames
from loramux.diffusion.lora_files.reader import read_adapter
from loramux.errors import AdapterRefused, InvalidRequest
from tests.image_factory import (
    ATTENTION,
    CONVOLUTIONS,
    EMBEDDERS,
    FEED_FORWARD,
    TEXT,
    dora_tensors,
    draw_all,
    load_stock_lora,
    make_adapter,
    make_pipeline,
    rand_tensors,
    random_lengths,
    request_for,
    shared_pipeline,
)
from tests.stock_pipeline import StockPipeline

TOLERANCE = 1e-5
PARTS = {
    "a": ((*ATTENTION, *CONVOLUTIONS, *TEXT), 4),
    "b": ((*FEED_FORWARD, *EMBEDDERS, "to_q"), 2),
}


def names_of(name: str) -> PipelineNames:
    pipe = shared_pipeline(name)
    family = ImageEngine(pipe).family
    return PipelineNames(pipe, family.denoiser, family.text_encoders)


def read(folder, tensors, name, header=None):
    path = Path(folder) / "adapter.safetensors"
    save_file({key: value.contiguous() for key, value in tensors.items()}, path, header)
    return read_adapter(path, names_of(name))


def load_stock_dora(stock, tensors, adapter):
    """Load with diffusers, which drops the magnitudes of text encoders: they are set after it."""
    load_stock_lora(stock.pipe, tensors, adapter.cid)
    for component, modules in adapter.components.items():
        for path in modules:
            layer = getattr(stock.pipe, component).get_submodule(path)
            loaded = layer.lora_magnitude_vector[adapter.cid].weight
            meant = tensors[f"{component}.{path}.lora_magnitude_vector"].view(loaded.shape)
            # If this changes, diffusers has been mended, and docs/images.md says so no longer.
            assert torch.equal(loaded, meant) == (not component.startswith("text"))
            loaded.data = meant


@pytest.mark.parametrize("name", ["flux", pytest.param("sdxl", marks=pytest.mark.slow)])
def test_a_mixed_batch_is_what_diffusers_draws(name, tmp_path):
    """At weights of any sign: PEFT takes the norm after it has multiplied the delta."""
    pipe = make_pipeline(name)
    plain = make_adapter(pipe, "plain", (*ATTENTION, *CONVOLUTIONS, *TEXT), rank=4)
    engine, stock = ImageEngine(pipe), StockPipeline(name, [plain])
    engine.add_adapter(plain)
    for cid, (endings, rank) in PARTS.items():
        made = make_adapter(
            pipe, cid, endings, rank=rank, components=stock.pipe._lora_loadable_modules
        )
        tensors = dora_tensors(shared_pipeline(name), made)
        adapter, report = read(tmp_path, tensors, name)
        assert report.method == "DoRA" and adapter.is_dora
        engine.add_adapter(replace(adapter, cid=cid))
        load_stock_dora(stock, tensors, replace(adapter, cid=cid))
        stock.know(replace(adapter, cid=cid))
    requests = [
        request_for(name, "base"),
        *(request_for(name, f"{w}", selection=(("a", w),)) for w in (1.0, 0.5, -0.4, 1.7)),
        request_for(name, "other", selection=(("b", 1.0),), steps=4),
        request_for(name, "plain", selection=(("plain", 0.7),)),
        request_for(name, "guided", selection=(("b", 0.3),), guidance_scale=3.0),
    ]
    expected = {one.request_id: stock.draw(one) for one in requests}
    drawn = draw_all(engine, requests)
    for one in requests:
        assert float((drawn[one.request_id] - expected[one.request_id]).abs().max()) < TOLERANCE
    bare = draw_all(engine, [request_for(name, "1.0"), request_for(name, "other", steps=4)])
    assert all(float((bare[key] - expected[key]).abs().max()) > 1e-2 for key in bare)


def scaled(weight, delta, lengths):
    """Return the weight of a module with DoRA at weight 1."""
    moved = (weight + delta.view(weight.shape)).flatten(1)
    return (moved * (lengths / moved.norm(dim=1))[:, None]).view(weight.shape)


@pytest.mark.parametrize("form", ["kohya", "fused", "swapped", "loha"])
def test_other_files_draw_what_scaled_weights_draw(form, tmp_path):
    """kohya's names with alpha, a matrix of three modules, swapped halves, LoHa."""
    name = "sdxl" if form == "kohya" else "flux"
    tensors, deltas = FILES[form](shared_pipeline(name))
    adapter, report = read(tmp_path, tensors, name)
    assert report.method == ("LoHa and DoRA" if form == "loha" else "DoRA")
    pipe = make_pipeline(name)
    engine = ImageEngine(make_pipeline(name))
    engine.add_adapter(adapter)
    request = request_for(name, "x", selection=((adapter.cid, 1.0),))
    assert sorted(deltas) == sorted(adapter.components["unet" if name == "sdxl" else "transformer"])
    net = pipe.unet if name == "sdxl" else pipe.transformer
    for path, (delta, lengths) in deltas.items():
        module = net.get_submodule(path)
        module.weight.data = scaled(module.weight.data, delta, lengths)
    expected = draw_all(ImageEngine(pipe), [request_for(name, "x")])["x"]
    drawn = draw_all(engine, [request])["x"]
    assert float((drawn - expected).abs().max()) < TOLERANCE
    without = draw_all(engine, [request_for(name, "x")])["x"]
    assert float((without - expected).abs().max()) > 1e-3


def kohya_file(pipe):
    adapter = make_adapter(pipe, "k", ("attn1.to_q", "conv1"), rank=4, components=("unet",))
    tensors, deltas = {}, {}
    for path, pair in adapter.components["unet"].items():
        key = f"lora_unet_{path.replace('.', '_')}"
        weight = pipe.unet.get_submodule(path).weight
        ones = (1,) * (weight.dim() - 2)
        lengths = random_lengths(weight, 3)
        tensors[f"{key}.lora_down.weight"] = pair.a
        tensors[f"{key}.lora_up.weight"] = pair.b.view(*pair.b.shape, *ones) * 2
        tensors[f"{key}.alpha"] = torch.tensor(2.0)
        tensors[f"{key}.dora_scale"] = lengths.view(-1, 1, *ones)
        deltas[path] = (pair.delta(), lengths)
    return tensors, deltas


def fused_file(pipe):
    paths = [f"transformer_blocks.0.attn.to_{letter}" for letter in "qkv"]
    weight = torch.cat([pipe.transformer.get_submodule(path).weight for path in paths])
    a, b = rand_tensors(4, weight.shape[1]) / 4, rand_tensors(len(weight), 4)
    lengths = random_lengths(weight, 4)
    key = "lora_unet_double_blocks_0_img_attn_qkv"
    tensors = {f"{key}.lora_down.weight": a, f"{key}.lora_up.weight": b}
    tensors[f"{key}.dora_scale"] = lengths[:, None]
    parts = zip(paths, (b @ a).chunk(3), lengths.chunk(3), strict=True)
    return tensors, {path: (delta, length) for path, delta, length in parts}


def swapped_file(pipe):
    path = "norm_out.linear"
    weight = pipe.transformer.get_submodule(path).weight
    a, b = rand_tensors(4, weight.shape[1]) / 4, rand_tensors(len(weight), 4)
    lengths = random_lengths(weight, 5)
    key = "lora_unet_final_layer_adaLN_modulation_1"
    tensors = {
        f"{key}.lora_down.weight": a,
        f"{key}.lora_up.weight": torch.cat(b.chunk(2)[::-1]),
        f"{key}.dora_scale": torch.cat(lengths.chunk(2)[::-1])[:, None],
    }
    return tensors, {path: (b @ a, lengths)}


def loha_file(pipe):
    path = "single_transformer_blocks.0.proj_mlp"
    weight = pipe.transformer.get_submodule(path).weight
    first = (rand_tensors(len(weight), 2), rand_tensors(2, weight.shape[1]) / 2)
    second = (first[0].flip(0), first[1].flip(1))
    lengths = random_lengths(weight, 6)
    key = "lycoris_single_transformer_blocks_0_proj_mlp"
    halves = {"w1_a": first[0], "w1_b": first[1], "w2_a": second[0], "w2_b": second[1]}
    tensors = {f"{key}.hada_{half}": tensor for half, tensor in halves.items()}
    tensors[f"{key}.alpha"], tensors[f"{key}.dora_scale"] = torch.tensor(2.0), lengths[:, None]
    return tensors, {path: ((first[0] @ first[1]) * (second[0] @ second[1]), lengths)}


FILES = {"kohya": kohya_file, "fused": fused_file, "swapped": swapped_file, "loha": loha_file}
Q = "transformer.transformer_blocks.0.attn.to_q"
K = "transformer.transformer_blocks.0.attn.to_k"


def flux_tensors():
    pipe = shared_pipeline("flux")
    return dora_tensors(pipe, make_adapter(pipe, "x", ("blocks.0.attn.to_q", "attn.to_k"), rank=2))


def without(key):
    return lambda tensors: {name: value for name, value in tensors.items() if name != key}


def put(key, value, drop=None):
    return lambda tensors: without(drop)(tensors) | {key: value}


BROKEN = {
    "columns": (
        put(f"{Q}.dora_scale", torch.ones(1, 32), f"{Q}.lora_magnitude_vector"),
        {},
        "dora_tensors",
        r"dora_scale \[1, 32\] is not one magnitude of each output row",
    ),
    "two": (put(f"{Q}.dora_scale", torch.ones(32, 1)), {}, "dora_tensors", "dora_scale"),
    "length": (put(f"{Q}.lora_magnitude_vector", torch.ones(31)), {}, "wrong_shape", "31 DoRA"),
    "lacking": (
        without(f"{K}.lora_magnitude_vector"),
        {},
        "dora_tensors",
        "to_k lacks a DoRA magnitude, and other modules have one",
    ),
    "unsaid": (
        dict,
        {"use_dora": False},
        "dora_tensors",
        "has a DoRA magnitude, and use_dora is False",
    ),
    "alone": (without(f"{Q}.lora_B.weight"), {}, "incomplete_pair", "to_q has a, which is not"),
    "nan": (
        put(f"{Q}.lora_magnitude_vector", torch.full((32,), torch.nan)),
        {},
        "not_finite",
        "to_q",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_refused_with_the_reason(case, tmp_path):
    change, config, code, reason = BROKEN[case]
    fields = {f"transformer.{key}": value for key, value in config.items()}
    header = {"lora_adapter_metadata": json.dumps(fields)} if fields else None
    with pytest.raises(AdapterRefused, match=reason) as caught:
        read(tmp_path, change(flux_tensors()), "flux", header)
    assert caught.value.code == code and caught.value.fix


def test_a_header_that_says_use_dora_needs_magnitudes(tmp_path):
    fields = {"transformer.use_dora": True, "transformer.lora_alpha": 2}
    header = {"lora_adapter_metadata": json.dumps(fields)}
    adapter, _ = read(tmp_path, flux_tensors(), "flux", header)
    assert adapter.is_dora
    plain = {name: value for name, value in flux_tensors().items() if "magnitude" not in name}
    with pytest.raises(AdapterRefused, match="lacks a DoRA magnitude, and use_dora is True"):
        read(tmp_path, plain, "flux", header)


def test_lengths_alone_are_an_effect(tmp_path):
    """Also where B @ A is zero; the lengths of the base itself change nothing."""
    tensors = flux_tensors()
    for name in tensors:
        if "lora_B" in name:
            tensors[name] = tensors[name] * 0
    assert read(tmp_path, tensors, "flux")[0].is_dora
    net = shared_pipeline("flux").transformer
    for name in tensors:
        path, _, role = name.removeprefix("transformer.").rpartition(".")
        if role == "lora_magnitude_vector":
            tensors[name] = net.get_submodule(path).weight.detach().norm(dim=1)
    with pytest.raises(AdapterRefused, match="would change nothing"):
        read(tmp_path, tensors, "flux")


def test_a_sum_with_others_is_refused_by_name(tmp_path):
    adapter, _ = read(tmp_path, flux_tensors(), "flux")
    engine = ImageEngine(make_pipeline("flux"))
    engine.add_adapter(adapter)
    engine.add_adapter(make_adapter(shared_pipeline("flux"), "plain", ATTENTION))
    both = ((adapter.cid, 1.0), ("plain", 0.5))
    with pytest.raises(
        InvalidRequest, match=f"`{adapter.cid}` cannot be used in a sum .* it is DoRA"
    ):
        engine.add(request_for("flux", "x", selection=both))
    assert not engine.has_work
    draw_all(engine, [request_for("flux", "x", selection=both[:1])])


@pytest.mark.parametrize("weight", [1.0, 0.5, -0.7, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factors_are_magnitudes_by_norms(weight, dtype):
    """In bfloat16, too: what is stored is small beside 1."""
    base, a, b = rand_tensors(24, 40), rand_tensors(3, 40) * 0.2, rand_tensors(24, 3) * 0.3
    lengths = base.norm(dim=1) * torch.linspace(0.95, 1.05, 24)
    got = dora_factors(dora_rows("x", base, a, b, lengths).to(dtype), weight)
    expected = lengths.double() / (base + weight * b @ a).double().norm(dim=1)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=0)
