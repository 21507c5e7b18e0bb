"""Every format of LoRA files: read right, or refused with a reason; diffusers where it is right."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from diffusers import StableDiffusionXLPipeline, UNet2DConditionModel
from diffusers.utils import convert_unet_state_dict_to_peft
from safetensors.torch import save_file

from loramux.diffusion.adapter import ImageAdapter, Kronecker, LowRank
from loramux.diffusion.digest import pipeline_digest
from loramux.diffusion.engine import ImageEngine
from loramux.diffusion.lora_files.names import PipelineNames
from loramux.diffusion.lora_files.reader import read_adapter
from loramux.diffusion.lora_files.unet_names import sgm_names
from loramux.errors import AdapterRefused
from tests.image_factory import (
    draw_all,
    load_stock_lora,
    make_pipeline,
    request_for,
    shared_pipeline,
)
from tests.lora_file_rows import (
    ERROR,
    FLUX_Q,
    FLUX_QKV,
    FUSED,
    NO_EFFECT,
    QKV,
    RIGHT,
    ROWS,
    UNET,
    WIDTH,
    A,
    B,
    R,
    kohya,
    peft,
    rand,
)

NO_BLOCK = {"transformer_blocks.7.attn.to_q": (A, B[:WIDTH])}
NAN = {path: (a * math.nan, b) for path, (a, b) in QKV.items()}
ZERO = {path: (a, b * 0) for path, (a, b) in QKV.items()}
REFUSED = {
    # name: (pipeline, file, code, part of the reason)
    "oft": (
        "sdxl",
        {"lora_unet_mid_block_attentions_0_proj_in.oft_blocks": rand(2, 2, 2)},
        "unserved_method",
        "OFT",
    ),
    "lokr-half": (
        "flux",
        {f"diffusion_model.{FLUX_Q}.lokr_w1": rand(4, 4)},
        "incomplete_pair",
        "lokr_w1, which is not a whole pair",
    ),
    "lokr-shape": (
        "flux",
        {
            f"diffusion_model.{FLUX_Q}.lokr_w1": rand(4, 5),
            f"diffusion_model.{FLUX_Q}.lokr_w2": rand(8, 8),
        },
        "wrong_shape",
        r"diffusion_model.*with 40 inputs.*\[32\]",
    ),
    "lokr-factors": (
        "flux",
        {
            f"diffusion_model.{FLUX_Q}.lokr_w1": rand(4, 4),
            f"diffusion_model.{FLUX_Q}.lokr_w2_a": rand(8, 2),
            f"diffusion_model.{FLUX_Q}.lokr_w2_b": rand(3, 8),
        },
        "wrong_shape",
        "do not match",
    ),
    "lokr-dora": (
        "flux",
        {
            f"lora_unet_{FLUX_Q.replace('.', '_')}.lokr_w1": rand(4, 4),
            f"lora_unet_{FLUX_Q.replace('.', '_')}.lokr_w2": rand(8, 8),
            f"lora_unet_{FLUX_Q.replace('.', '_')}.dora_scale": rand(WIDTH, 1),
        },
        "dora_tensors",
        "LoKr",
    ),
    "other-flux": (
        "flux",
        peft("transformer.", QKV)
        | peft("transformer.single_transformer_blocks.0.attn.", {"to_qkv_mlp_proj": (A, B)}),
        "other_family",
        r"FLUX\.2, and this model is FLUX\.1",
    ),
    "other-flux-1": (
        "flux2",
        peft("diffusion_model.", {"double_blocks.0.img_mod.lin": (A, B)}),
        "other_family",
        r"FLUX\.1, and this model is FLUX\.2",
    ),
    "control": (
        "flux",
        peft("", FUSED) | {"double_blocks.0.img_attn.norm.query_norm.scale": rand(16)},
        "unserved_method",
        "control LoRA",
    ),
    "alpha-0": (
        "flux",
        kohya("lora_unet_", FUSED)
        | {"lora_unet_double_blocks_0_img_attn_qkv.alpha": torch.tensor(0.0)},
        "no_effect",
        "Its alpha is 0",
    ),
    "tensor-name": (
        "flux",
        peft("transformer.", {FLUX_Q: (rand(R, WIDTH), rand(40, R))}),
        "wrong_shape",
        r"^transformer\.transformer_blocks",
    ),
    "missing-block": (
        "flux",
        peft("transformer.", QKV | NO_BLOCK),
        "unknown_tensors",
        "transformer_blocks.7",
    ),
    "wider-base": (
        "flux",
        peft("transformer.", {FLUX_Q: (rand(R, 40), rand(WIDTH, R))}),
        "wrong_shape",
        r"\[40\].*\[32\]",
    ),
    "wider-outputs": (
        "flux",
        kohya("lora_unet_", {FLUX_QKV: (A, rand(120, R))}),
        "wrong_shape",
        "120 outputs.*96",
    ),
    "other-family": ("sdxl", kohya("lora_unet_", FUSED), "other_family", "FLUX"),
    "full-difference": (
        "flux",
        {f"diffusion_model.{FLUX_Q}.diff": rand(300, 300)},
        "full_weights",
        r"full difference of \[300, 300\]",
    ),
    "norm-difference": (
        "flux",
        peft("diffusion_model.", QKV) | {"diffusion_model.some.norm.diff": rand(8)},
        "full_weights",
        "some.norm.diff",
    ),
    "bias": (
        "flux",
        peft("transformer.", QKV) | {f"transformer.{FLUX_Q}.lora_A.bias": rand(R)},
        "bias_tensors",
        "bias of lora_A",
    ),
    "bias-alone": (
        "flux",
        peft("transformer.", QKV) | {"transformer.x_embedder.lora_B.bias": rand(WIDTH)},
        "incomplete_pair",
        "x_embedder has bias",
    ),
    "bias-length": (
        "flux",
        peft("transformer.", QKV) | {f"transformer.{FLUX_Q}.lora_B.bias": rand(R)},
        "wrong_shape",
        "a bias of 4 for 32 outputs",
    ),
    "half-a-pair": (
        "flux",
        {f"transformer.{FLUX_Q}.lora_A.weight": A},
        "incomplete_pair",
        FLUX_Q,
    ),
    "twice": (
        "flux",
        peft("transformer.", QKV) | kohya("lora_unet_", {FLUX_QKV: (A, -B)}),
        "duplicate_tensors",
        "twice",
    ),
    "nan": ("flux", peft("transformer.", NAN), "not_finite", "to_q"),
    "zero": ("flux", peft("transformer.", ZERO), "no_effect", "zero"),
    "base-norm": (
        "flux",
        peft("transformer.", QKV)
        | {"transformer.transformer_blocks.0.attn.norm_q.weight": rand(16)},
        "unknown_tensors",
        "norm_q",
    ),
}


def names_of(pipe) -> PipelineNames:
    engine = ImageEngine(pipe)
    return PipelineNames(pipe, engine.family.denoiser, engine.family.text_encoders)


@pytest.fixture(scope="module")
def names():
    return {name: names_of(shared_pipeline(name)) for name in ("sdxl", "flux", "flux2")}


def write(folder, file, metadata=None):
    path = folder / "lora.safetensors"
    save_file({key: tensor.contiguous().clone() for key, tensor in file.items()}, path, metadata)
    return path


def deltas(adapter: ImageAdapter) -> dict[str, torch.Tensor]:
    return {
        f"{component}.{path}": pair.delta()
        for component, modules in adapter.components.items()
        for path, pair in modules.items()
    }


@pytest.mark.parametrize("row", ROWS)
def test_each_format_is_read_right(tmp_path, names, row):
    pipeline, (file, meant), _ = ROWS[row]
    adapter, report = read_adapter(write(tmp_path, file), names[pipeline])
    got, wanted = deltas(adapter), deltas(meant)
    assert got.keys() == wanted.keys()
    for path in wanted:
        assert got[path].shape == wanted[path].shape
        torch.testing.assert_close(got[path], wanted[path], atol=1e-6, rtol=1e-5)
    assert sum(report.num_modules.values()) == len(wanted)


@pytest.mark.parametrize("row", REFUSED)
def test_other_files_are_refused_with_the_reason(tmp_path, names, row):
    pipeline, file, code, reason = REFUSED[row]
    before = pipeline_digest(shared_pipeline(pipeline))
    with pytest.raises(AdapterRefused, match=reason) as caught:
        read_adapter(write(tmp_path, file), names[pipeline])
    assert caught.value.code == code
    assert caught.value.fix
    assert pipeline_digest(shared_pipeline(pipeline)) == before


def draw_stock(pipeline, file):
    """Draws with diffusers' own loader; returns the pixels of the base and of the adapter."""
    pipe = make_pipeline(pipeline)
    options = {} if pipeline == "sdxl" else {"max_sequence_length": 16}

    def draw():
        return torch.from_numpy(
            pipe(
                "a red circle",
                num_inference_steps=2,
                height=32,
                width=32,
                output_type="np",
                generator=torch.Generator().manual_seed(0),
                **options,
            ).images[0]
        )

    base = draw()
    load_stock_lora(pipe, file, "x")
    return base, draw()


def draw_ours(pipeline, adapter):
    engine = ImageEngine(shared_pipeline(pipeline))
    if adapter is not None:
        engine.add_adapter(adapter)
    selection = () if adapter is None else ((adapter.cid, 1.0),)
    request = request_for(
        pipeline, "x", prompt="a red circle", steps=2, seed=0, selection=selection
    )
    pixels = draw_all(engine, [request])["x"]
    if adapter is not None:
        engine.remove_adapter(adapter.cid)
    return pixels


# The quick run has one row of each pipeline; the others compare the same tensors with the truth.
QUICK = ("kohya-text", "flux-kohya-qkv")
ORACLE = [row if row in QUICK else pytest.param(row, marks=pytest.mark.slow) for row in ROWS]


@pytest.mark.parametrize("row", ORACLE)
def test_pictures_are_those_of_diffusers_where_it_is_right(tmp_path, names, row):
    pipeline, (file, meant), theirs = ROWS[row]
    adapter, _ = read_adapter(write(tmp_path, file), names[pipeline])
    wanted = draw_ours(pipeline, meant)
    assert float((draw_ours(pipeline, adapter) - wanted).abs().max()) < 1e-5
    if theirs == ERROR:
        with pytest.raises(Exception):  # noqa: B017
            draw_stock(pipeline, file)
        return
    base, stock = draw_stock(pipeline, file)
    assert float((wanted - base).abs().max()) > 1e-3
    is_right = float((stock - wanted).abs().max()) < 1e-5
    # If one of these changes, diffusers has been mended, and docs/images.md says so no longer.
    assert is_right == (theirs == RIGHT)
    assert torch.equal(stock, base) == (theirs == NO_EFFECT)


def test_alpha_of_the_header_is_that_of_diffusers(tmp_path, names):
    """diffusers writes the LoraConfig of each component into the header."""
    config = {
        "r": R,
        "lora_alpha": 2,
        "alpha_pattern": {"attn.to_k": 6},
        "use_rslora": True,
        "target_modules": sorted({path.rpartition(".attn.")[2] for path in QKV}),
    }
    fields = {f"transformer.{key}": value for key, value in config.items()}
    header = {"lora_adapter_metadata": json.dumps(fields), "format": "pt"}
    file = peft("transformer.", QKV)
    adapter, _ = read_adapter(write(tmp_path, file, header), names["flux"])
    got = deltas(adapter)
    for path, (a, b) in QKV.items():
        scale = (6 if path.endswith("to_k") else 2) / math.sqrt(R)
        torch.testing.assert_close(got[f"transformer.{path}"], scale * b @ a)
    pipe = make_pipeline("flux")
    load_stock_lora(pipe, tmp_path / "lora.safetensors", "x")
    layer = pipe.transformer.get_submodule(FLUX_Q)
    assert layer.scaling["x"] == pytest.approx(2 / math.sqrt(R))


def test_a_peft_folder_has_its_alpha_in_its_config(tmp_path, names):
    save_file(peft("base_model.model.", UNET), tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": R, "lora_alpha": 3 * R}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    adapter, report = read_adapter(tmp_path, names["sdxl"])
    for path, (a, b) in UNET.items():
        torch.testing.assert_close(deltas(adapter)[f"unet.{path}"], 3 * b @ a)
    assert report.formats == ("PEFT",)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"fan_in_fan_out": True}))
    with pytest.raises(AdapterRefused, match="fan_in_fan_out"):
        read_adapter(tmp_path, names["sdxl"])


def test_a_folder_with_several_files_is_refused(tmp_path, names):
    for name in ("one", "two"):
        save_file(peft("unet.", UNET), tmp_path / f"{name}.safetensors")
    with pytest.raises(AdapterRefused, match=r"one.safetensors, two.safetensors"):
        read_adapter(tmp_path, names["sdxl"])
    save_file(peft("unet.", UNET), tmp_path / "pytorch_lora_weights.safetensors")
    assert read_adapter(tmp_path, names["sdxl"])[0].num_modules == len(UNET)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04" + b"x" * 50, b"version https://git-lfs"])
def test_files_that_are_no_safetensors_are_refused(tmp_path, names, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(AdapterRefused, match=r"x\.safetensors"):
        read_adapter(path, names["sdxl"])
    pickle = tmp_path / "x.pt"
    pickle.write_bytes(b"x")
    with pytest.raises(AdapterRefused, match="can run code"):
        read_adapter(pickle, names["sdxl"])


def test_trigger_words_come_from_the_header(tmp_path, names):
    tags = {"10_ink": {"ink style": 20, "a cat": 3}, "5_more": {"ink style": 5}}
    file = kohya("lora_unet_", UNET)
    header = {"ss_tag_frequency": json.dumps(tags)}
    _, report = read_adapter(write(tmp_path, file, header), names["sdxl"])
    assert report.trigger_words == ("ink style", "a cat")
    header["modelspec.trigger_phrase"] = "in ink style"
    _, report = read_adapter(write(tmp_path, file, header), names["sdxl"])
    assert report.trigger_words == ("in ink style",)
    assert report.method == "LoRA"
    assert report.formats == ("kohya",)


def test_the_cid_is_that_of_the_content(tmp_path, names):
    file = peft("unet.", UNET)
    first = read_adapter(write(tmp_path, file), names["sdxl"])[1]
    (tmp_path / "lora.safetensors").rename(tmp_path / "renamed.safetensors")
    second = read_adapter(tmp_path / "renamed.safetensors", names["sdxl"])[1]
    assert first.cid == second.cid
    other = read_adapter(write(tmp_path, {k: v * 2 for k, v in file.items()}), names["sdxl"])[1]
    assert other.cid != first.cid


@pytest.mark.slow
def test_all_kohya_names_of_the_real_sdxl_are_those_of_diffusers():
    """Every linear layer and convolution of the real UNet, in the original block names."""
    with torch.device("meta"):
        unet = UNet2DConditionModel(
            sample_size=128,
            in_channels=4,
            out_channels=4,
            block_out_channels=(320, 640, 1280),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            cross_attention_dim=2048,
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=[1, 2, 10],
            attention_head_dim=[5, 10, 20],
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
        )
    names = PipelineNames(SimpleNamespace(unet=unet), "unet", ())
    targets = names.targets["unet"]
    assert len(targets) == 794
    originals = sgm_names(targets, 2)
    for path, original in originals.items():
        name = "lora_unet_" + original.replace(".", "_")
        found = names.find(name)
        assert found is not None and found.paths == (path,)
        file = {f"{name}.lora_down.weight": torch.zeros(2, 4)}
        file[f"{name}.lora_up.weight"] = torch.zeros(4, 2)
        made, _ = StableDiffusionXLPipeline.lora_state_dict(file, unet_config=unet.config)
        bare = {key.removeprefix("unet."): value for key, value in made.items()}
        theirs = {key.split(".lora_")[0] for key in convert_unet_state_dict_to_peft(bare)}
        assert theirs == {path}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_8_bit_floats_are_read_exactly(tmp_path, names, dtype):
    file = {key: tensor.to(dtype) for key, tensor in peft("transformer.", QKV).items()}
    adapter, _ = read_adapter(write(tmp_path, file), names["flux"])
    for path, (a, b) in QKV.items():
        wanted = b.to(dtype).float() @ a.to(dtype).float()
        assert torch.equal(deltas(adapter)[f"transformer.{path}"], wanted)
    broken = {key: (tensor.float() * torch.nan).to(dtype) for key, tensor in file.items()}
    with pytest.raises(AdapterRefused, match="NaN"):
        read_adapter(write(tmp_path, broken), names["flux"])


def test_the_ranks_of_a_factored_lokr_decide_its_form(tmp_path, names):
    """A pair up to rank 128; the factors beyond, which take less memory and no full matrix."""
    found = {}
    for rank in (2, 40):
        parts = {"w1": rand(4, 4), "w2_a": rand(8, rank), "w2_b": rand(rank, 8)}
        name = f"lora_unet_{FLUX_Q.replace('.', '_')}"
        file = {f"{name}.lokr_{key}": part for key, part in parts.items()}
        adapter, report = read_adapter(write(tmp_path, file), names["flux"])
        assert report.method == "LoKr"
        found[rank] = adapter.components["transformer"][FLUX_Q]
        wanted = torch.kron(parts["w1"], parts["w2_a"] @ parts["w2_b"])
        torch.testing.assert_close(found[rank].delta(), wanted, atol=1e-5, rtol=1e-5)
    assert isinstance(found[2], LowRank) and found[2].rank == 8
    assert isinstance(found[40], Kronecker) and found[40].num_elements == 16 + 64
