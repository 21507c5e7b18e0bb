"""Every format of LoRA files: read right, or refused with a reason; diffusers where it is right."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch
from diffusers import StableDiffusionXLPipeline, UNet2DConditionModel
from diffusers.utils import convert_unet_state_dict_to_peft
from safetensors.torch import save_file

from loramux.diffusion.adapter import ImageAdapter, LowRank
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

R = 4
WIDTH = 32
FLUX_Q = "transformer_blocks.0.attn.to_q"
FLUX_QKV = "double_blocks.0.img_attn.qkv"
_random = torch.Generator().manual_seed(3)
Pairs = Mapping[str, tuple[torch.Tensor, torch.Tensor]]


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=_random) * 0.4


def pick(component: str, endings: tuple[str, ...], pipeline: str = "sdxl") -> Pairs:
    """A random pair for each module of the component whose path ends so."""
    found = {}
    for path, module in getattr(shared_pipeline(pipeline), component).named_modules():
        weight = getattr(module, "weight", None)
        if weight is not None and weight.dim() in (2, 4) and path.endswith(endings):
            shape = weight.shape
            found[path] = (rand(R, *shape[1:]), rand(shape[0], R, *(1,) * (weight.dim() - 2)))
    assert found
    return found


def kohya(prefix: str, pairs: Pairs, alpha: float = R / 2) -> dict[str, torch.Tensor]:
    """The pairs with an alpha that must be applied for them to come out right."""
    file = {}
    for path, (a, b) in pairs.items():
        name = prefix + path.replace(".", "_")
        file[f"{name}.lora_down.weight"] = a
        file[f"{name}.lora_up.weight"] = b * R / alpha
        file[f"{name}.alpha"] = torch.tensor(float(alpha))
    return file


def peft(prefix: str, pairs: Pairs) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}{path}.lora_{half}.weight": tensor
        for path, pair in pairs.items()
        for half, tensor in zip("AB", pair, strict=True)
    }


def old_name(path: str) -> str:
    for end in ("to_q", "to_k", "to_v", "to_out.0"):
        if path.endswith(f".{end}"):
            return path.removesuffix(end) + f"processor.{end.removesuffix('.0')}_lora"
    return f"{path}.lora"


def truth(**components: Pairs) -> ImageAdapter:
    made = {
        component: {path: LowRank(a, b.flatten(1)) for path, (a, b) in pairs.items()}
        for component, pairs in components.items()
    }
    return ImageAdapter(cid="truth", components=made)


UNET = pick("unet", ("attn1.to_q", "attn2.to_out.0", "ff.net.2"))
CONV = pick("unet", ("conv1", "downsamplers.0.conv", "time_emb_proj", "conv_shortcut"))
CLIP = pick("text_encoder", ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"))
SOME_CLIP = {p: pair for p, pair in CLIP.items() if p.endswith(("q_proj", "fc1"))}
CLIP_2 = pick("text_encoder_2", ("q_proj", "k_proj", "v_proj", "out_proj"))
T5 = pick("text_encoder_2", ("SelfAttention.q", "DenseReluDense.wo"), "flux")
A, B = rand(R, WIDTH), rand(3 * WIDTH, R)
QKV = {
    f"transformer_blocks.0.attn.to_{name}": (A, B[i * WIDTH : (i + 1) * WIDTH])
    for i, name in enumerate("qkv")
}
FUSED = {FLUX_QKV: (A, B)}


def text_names(pairs: Pairs) -> Pairs:
    return {f"text_model.{path.removeprefix('text_model.')}": pair for path, pair in pairs.items()}


def with_module(theirs: str, ours: str):
    """A fused file that also has one more module, and what it means."""
    weight = shared_pipeline("flux").transformer.get_submodule(ours).weight
    a, b = rand(R, weight.shape[1]), rand(weight.shape[0], R)
    mine = torch.cat(b.chunk(2)[::-1]) if "adaLN" in theirs else b
    return kohya("lora_unet_", FUSED | {theirs: (a, b)}), truth(transformer=QKV | {ours: (a, mine)})


def loha(pipeline: str, component: str, names: Mapping[str, tuple[str, ...]], rank: int = 2):
    """LoHa factors of each name, and the full deltas of the modules that the name stands for."""
    net = getattr(shared_pipeline(pipeline), component)
    file, meant = {}, {}
    for name, paths in names.items():
        weights = [net.get_submodule(path).weight for path in paths]
        rows, columns = sum(map(len, weights)), weights[0][0].numel()
        w = [rand(rows, rank), rand(rank, columns), rand(rows, rank), rand(rank, columns)]
        keys = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
        flat = name.replace(".", "_")
        file |= {f"lora_unet_{flat}.{key}": part for key, part in zip(keys, w, strict=True)}
        file[f"lora_unet_{flat}.alpha"] = torch.tensor(rank / 2)
        delta = 0.5 * (w[0] @ w[1]) * (w[2] @ w[3])
        for path, part in zip(paths, delta.split([len(x) for x in weights]), strict=True):
            shape = weights[0].shape[1:]
            meant[path] = (torch.eye(columns).view(columns, *shape), part)
    return file, truth(**{component: meant})


def tucker():
    """LoCon in Tucker form: 1 x 1, 3 x 3, 1 x 1."""
    path = "down_blocks.0.resnets.0.conv1"
    weight = shared_pipeline("sdxl").unet.get_submodule(path).weight
    down, mid, up = rand(R, weight.shape[1], 1, 1), rand(R, R, 3, 3), rand(weight.shape[0], R, 1, 1)
    parts = {"down": down, "mid": mid, "up": up}
    name = "lora_unet_" + path.replace(".", "_")
    file = {f"{name}.lora_{key}.weight": part for key, part in parts.items()}
    folded = torch.einsum("rshw,si->rihw", mid, down[:, :, 0, 0])
    return file, truth(unet={path: (folded, up)})


def single_block():
    """A fused linear1 of a width that is not 3072."""
    a, b = rand(R, WIDTH), rand(7 * WIDTH, R)
    block = "single_transformer_blocks.0."
    places = (("attn.to_q", 0, 1), ("attn.to_k", 1, 2), ("attn.to_v", 2, 3), ("proj_mlp", 3, 7))
    meant = {block + n: (a, b[first * WIDTH : last * WIDTH]) for n, first, last in places}
    return kohya("lora_unet_", {"single_blocks.0.linear1": (a, b)}), truth(transformer=meant)


def processors():
    unet = pick("unet", ("attn1.to_q", "attn2.to_v", "attn1.to_out.0", "ff.net.2"))
    file = {
        f"unet.{old_name(path)}.{half}.weight": tensor
        for path, pair in unet.items()
        for half, tensor in zip(("down", "up"), pair, strict=True)
    }
    return file, truth(unet=unet)


def xlabs():
    first = {"double_blocks.0.processor.qkv_lora1": (A, B)}
    single = rand(R, WIDTH), rand(WIDTH, R)
    second = {"single_blocks.0.processor.proj_lora": (rand(R, 5 * WIDTH), single[1])}
    file = {
        f"{name}.{half}.weight": tensor
        for name, pair in (first | second).items()
        for half, tensor in zip(("down", "up"), pair, strict=True)
    }
    meant = {"single_transformer_blocks.0.proj_out": second[next(iter(second))]}
    return file, truth(transformer=QKV | meant)


def sgm():
    """The original block names of the UNet."""
    originals = sgm_names(UNET, 2)
    named = {originals[path]: pair for path, pair in UNET.items()}
    assert not named.keys() & UNET.keys()
    return kohya("lora_unet_", named), truth(unet=UNET)


RIGHT, LOST, NO_EFFECT, WRONG, ERROR = "right", "lost", "no effect", "wrong", "error"
ROWS = {
    # name: (pipeline, file and what it means, what diffusers 0.42 does with it)
    "diffusers": ("sdxl", (peft("unet.", UNET), truth(unet=UNET)), RIGHT),
    "old-diffusers": ("sdxl", processors(), RIGHT),
    "kohya-alpha": ("sdxl", (kohya("lora_unet_", UNET), truth(unet=UNET)), RIGHT),
    "kohya-sgm": ("sdxl", sgm(), RIGHT),
    "kohya-locon": ("sdxl", (kohya("lora_unet_", CONV), truth(unet=CONV)), RIGHT),
    "kohya-text": (
        "sdxl",
        (
            kohya("lora_unet_", UNET)
            | kohya("lora_te1_", text_names(CLIP))
            | kohya("lora_te2_", text_names(CLIP_2)),
            truth(unet=UNET, text_encoder=CLIP, text_encoder_2=CLIP_2),
        ),
        RIGHT,
    ),
    "kohya-some-text": (
        "sdxl",
        (
            kohya("lora_unet_", UNET) | kohya("lora_te1_", text_names(SOME_CLIP)),
            truth(unet=UNET, text_encoder=SOME_CLIP),
        ),
        LOST,
    ),
    "peft-keys": ("sdxl", (peft("base_model.model.", UNET), truth(unet=UNET)), NO_EFFECT),
    "no-prefix": ("sdxl", (peft("", UNET), truth(unet=UNET)), NO_EFFECT),
    "loha": ("sdxl", loha("sdxl", "unet", {path: (path,) for path in UNET}), ERROR),
    "loha-conv": ("sdxl", loha("sdxl", "unet", {p: (p,) for p in CONV if "conv1" in p}), ERROR),
    "loha-full-rank": ("sdxl", loha("sdxl", "unet", {path: (path,) for path in UNET}, 12), ERROR),
    "tucker": ("sdxl", tucker(), ERROR),
    "flux-kohya-qkv": ("flux", (kohya("lora_unet_", FUSED), truth(transformer=QKV)), RIGHT),
    "flux-comfyui": (
        "flux",
        (
            {
                f"diffusion_model.{FLUX_QKV}.lora_{half}.weight": tensor
                for half, tensor in zip(("down", "up"), (A, B), strict=True)
            },
            truth(transformer=QKV),
        ),
        RIGHT,
    ),
    "flux-xlabs": ("flux", xlabs(), RIGHT),
    "flux-linear1": ("flux", single_block(), ERROR),
    "flux-img_in": ("flux", with_module("img_in", "x_embedder"), LOST),
    "flux-txt_in": ("flux", with_module("txt_in", "context_embedder"), LOST),
    "flux-time_in": (
        "flux",
        with_module("time_in.in_layer", "time_text_embed.timestep_embedder.linear_1"),
        LOST,
    ),
    "flux-vector_in": (
        "flux",
        with_module("vector_in.in_layer", "time_text_embed.text_embedder.linear_1"),
        LOST,
    ),
    "flux-guidance_in": (
        "flux",
        with_module("guidance_in.in_layer", "time_text_embed.guidance_embedder.linear_1"),
        LOST,
    ),
    "flux-final-linear": ("flux", with_module("final_layer.linear", "proj_out"), LOST),
    "flux-final-norm": (
        "flux",
        with_module("final_layer.adaLN_modulation.1", "norm_out.linear"),
        LOST,
    ),
    "flux-alpha": (
        "flux",
        (
            {
                f"transformer.{FLUX_Q}.lora_down.weight": A,
                f"transformer.{FLUX_Q}.lora_up.weight": 2 * QKV[FLUX_Q][1],
                f"transformer.{FLUX_Q}.alpha": torch.tensor(R / 2),
            },
            truth(transformer={FLUX_Q: QKV[FLUX_Q]}),
        ),
        WRONG,
    ),
    "flux-ai-toolkit": ("flux", (peft("diffusion_model.", QKV), truth(transformer=QKV)), NO_EFFECT),
    "flux-original-peft": ("flux", (peft("", FUSED), truth(transformer=QKV)), NO_EFFECT),
    "flux-loha": ("flux", loha("flux", "transformer", {FLUX_QKV: tuple(QKV)}), NO_EFFECT),
    "flux-t5": (
        "flux",
        (
            kohya("lora_unet_", FUSED) | kohya("lora_te3_", T5),
            truth(transformer=QKV, text_encoder_2=T5),
        ),
        LOST,
    ),
    "flux-t5-comfyui": (
        "flux",
        (
            kohya("lora_unet_", FUSED) | peft("text_encoders.t5xxl.transformer.", T5),
            truth(transformer=QKV, text_encoder_2=T5),
        ),
        LOST,
    ),
}
LOKR = {
    f"lora_unet_{path.replace('.', '_')}.lokr_{name}": rand(4, 4)
    for path in UNET
    for name in ("w1", "w2")
}
NO_BLOCK = {"transformer_blocks.7.attn.to_q": (A, B[:WIDTH])}
NAN = {path: (a * math.nan, b) for path, (a, b) in QKV.items()}
ZERO = {path: (a, b * 0) for path, (a, b) in QKV.items()}
REFUSED = {
    # name: (pipeline, file, code, part of the reason)
    "lokr": ("sdxl", LOKR, "unserved_method", "LoKr"),
    "flux-lokr": (
        "flux",
        {f"diffusion_model.{FLUX_Q}.lokr_w1": rand(4, 4)},
        "unserved_method",
        "LoKr",
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
        {f"diffusion_model.{FLUX_Q}.diff": rand(WIDTH, WIDTH)},
        "full_weights",
        "diff",
    ),
    "bias": (
        "flux",
        peft("transformer.", QKV) | {f"transformer.{FLUX_Q}.lora_B.bias": rand(WIDTH)},
        "bias_tensors",
        "bias",
    ),
    "half-a-pair": (
        "flux",
        {f"transformer.{FLUX_Q}.lora_A.weight": A},
        "incomplete_pair",
        FLUX_Q,
    ),
    "twice": (
        "flux",
        peft("transformer.", QKV) | kohya("lora_unet_", FUSED),
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
    return {name: names_of(shared_pipeline(name)) for name in ("sdxl", "flux")}


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
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"lora_bias": True}))
    with pytest.raises(AdapterRefused, match="lora_bias"):
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
