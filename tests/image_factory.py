"""Tiny random pipelines of every image family, adapters for them, and diffusers as the oracle."""

from __future__ import annotations

import copy
import functools
import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    WanPipeline,
    WanTransformer3DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from diffusers.utils import logging as diffusers_logging
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
)
from transformers.utils import logging as transformers_logging

from loramux.diffusion.adapter import ImageAdapter, Kronecker, LowRank
from loramux.diffusion.engine import ImageEngine
from loramux.diffusion.events import ImageEvent
from loramux.types.image import ImageRequest

diffusers_logging.set_verbosity_error()
LENGTH = 16
"""max_sequence_length of requests, where the family has one."""
SIZE = 32
CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def make_tokenizer(max_length: int = 77) -> PreTrainedTokenizerFast:
    """Tokens are characters."""
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    vocab = {t: i for i, t in enumerate([*special, *map(chr, range(33, 127))])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split("", "isolated")]
    )
    core.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=max_length,
    )
    made.chat_template = CHAT
    return made


def make_clip(kind: Any) -> Any:
    config = CLIPTextConfig(
        vocab_size=1000,
        hidden_size=32,
        intermediate_size=37,
        projection_dim=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=77,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return kind(config).eval()


def make_t5() -> Any:
    config = T5Config(vocab_size=1000, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4)
    return T5EncoderModel(config).eval()


def make_vae(latent: int, channels: Sequence[int] = (4, 4), **more: Any) -> Any:
    count = len(channels)
    return AutoencoderKL(
        sample_size=32,
        in_channels=3,
        out_channels=3,
        block_out_channels=tuple(channels),
        layers_per_block=1,
        latent_channels=latent,
        down_block_types=("DownEncoderBlock2D",) * count,
        up_block_types=("UpDecoderBlock2D",) * count,
        **({"norm_num_groups": 1, "use_quant_conv": False, "use_post_quant_conv": False} | more),
    ).eval()


def make_qwen3(kind: Any) -> Any:
    config = Qwen3Config(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=1000,
        max_position_embeddings=512,
    )
    return kind(config).eval()


def sdxl() -> Any:
    unet = UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=2,
        sample_size=16,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        norm_num_groups=1,
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        cross_attention_dim=64,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=80,
    ).eval()
    return StableDiffusionXLPipeline(
        vae=make_vae(4, use_quant_conv=True, use_post_quant_conv=True),
        text_encoder=make_clip(CLIPTextModel),
        unet=unet,
        text_encoder_2=make_clip(CLIPTextModelWithProjection),
        tokenizer=make_tokenizer(),
        tokenizer_2=make_tokenizer(),
        scheduler=EulerDiscreteScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            timestep_spacing="leading",
            steps_offset=1,
        ),
        add_watermarker=False,
    )


def flux() -> Any:
    net = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=[4, 4, 8],
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
    ).eval()
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        text_encoder=make_clip(CLIPTextModel),
        vae=make_vae(1, shift_factor=0.0609, scaling_factor=1.5035),
        tokenizer=make_tokenizer(),
        text_encoder_2=make_t5(),
        tokenizer_2=make_tokenizer(64),
        transformer=net,
    )


def sd3() -> Any:
    net = SD3Transformer2DModel(
        sample_size=32,
        patch_size=1,
        in_channels=16,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=64,
        pooled_projection_dim=64,
        out_channels=16,
    ).eval()
    return StableDiffusion3Pipeline(
        transformer=net,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=make_vae(16, channels=(4,), shift_factor=0.0609, scaling_factor=1.5035),
        tokenizer=make_tokenizer(),
        text_encoder=make_clip(CLIPTextModelWithProjection),
        text_encoder_2=make_clip(CLIPTextModelWithProjection),
        tokenizer_2=make_tokenizer(),
        text_encoder_3=None,
        tokenizer_3=None,
    )


def wan() -> Any:
    net = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=256,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    ).eval()
    vae = AutoencoderKLWan(
        base_dim=3,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    ).eval()
    return WanPipeline(
        transformer=net,
        text_encoder=make_t5(),
        tokenizer=make_tokenizer(64),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        vae=vae,
    )


def qwen_image() -> Any:
    net = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    ).eval()
    text = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "rope_theta": 1e6,
        "rope_scaling": {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"},
    }
    eyes = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 16,
    }
    vae = AutoencoderKLQwenImage(
        base_dim=24,
        z_dim=4,
        dim_mult=[1, 2, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    ).eval()
    encoder = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=eyes)
    ).eval()
    return QwenImagePipeline(
        transformer=net,
        tokenizer=make_tokenizer(512),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        text_encoder=encoder,
        vae=vae,
    )


def z_image() -> Any:
    net = ZImageTransformer2DModel(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=16,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        norm_eps=1e-5,
        qk_norm=True,
        cap_feat_dim=16,
        rope_theta=256.0,
        t_scale=1000.0,
        axes_dims=[8, 4, 4],
        axes_lens=[256, 32, 32],
    ).eval()
    with torch.no_grad():  # diffusers leaves them uninitialised
        net.x_pad_token.fill_(1.0)
        net.cap_pad_token.fill_(1.0)
    vae = make_vae(
        16,
        channels=(32, 64),
        norm_num_groups=32,
        use_quant_conv=True,
        use_post_quant_conv=True,
        scaling_factor=0.3611,
        shift_factor=0.1159,
    )
    return ZImagePipeline(
        transformer=net,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        tokenizer=make_tokenizer(512),
        text_encoder=make_qwen3(Qwen3Model),
        vae=vae,
    )


def flux2() -> Any:
    net = Flux2Transformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=48,
        timestep_guidance_channels=256,
        axes_dims_rope=[4, 4, 4, 4],
        guidance_embeds=False,
    ).eval()
    vae = AutoencoderKLFlux2(
        sample_size=32,
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        block_out_channels=(4,),
        layers_per_block=1,
        latent_channels=1,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
    ).eval()
    return Flux2KleinPipeline(
        transformer=net,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        tokenizer=make_tokenizer(512),
        text_encoder=make_qwen3(Qwen3ForCausalLM),
        vae=vae,
    )


BUILDERS: dict[str, Callable[[], Any]] = {
    builder.__name__: builder for builder in (sdxl, flux, sd3, qwen_image, z_image, flux2, wan)
}
# Arguments of the stock pipeline's call.
STOCK_OPTIONS: dict[str, dict[str, Any]] = {
    "sdxl": {},
    "flux": {"max_sequence_length": LENGTH},
    "sd3": {"max_sequence_length": LENGTH},
    "qwen_image": {"max_sequence_length": LENGTH},
    "z_image": {"max_sequence_length": LENGTH},
    "flux2": {"max_sequence_length": LENGTH, "text_encoder_out_layers": (1, 1, 1)},
    "wan": {"max_sequence_length": LENGTH, "num_frames": 1},
}
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
FEED_FORWARD = ("net.0.proj", "net.2", "w1", "feed_forward.w2", "linear_in", "linear_out")
CONVOLUTIONS = ("conv1", "conv_shortcut", "downsamplers.0.conv", "conv_in")
TEXT = ("q_proj", "v_proj", "fc1", "SelfAttention.q", "wo", "gate_proj")
EMBEDDERS = (
    "x_embedder",
    "proj_mlp",
    "norm1.linear",
    "linear_1",
    "context_embedder",
    "2-1",
    "cap_embedder.1",
    "txt_in",
    "img_in",
    "time_proj",
)


def make_pipeline(name: str, seed: int = 0) -> Any:
    """Return a pipeline of a family with weights that depend on the seed alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        pipe = BUILDERS[name]()
    pipe.set_progress_bar_config(disable=True)
    return pipe


@functools.cache
def shared_pipeline(name: str) -> Any:
    """Return a pipeline that tests only draw with."""
    return make_pipeline(name)


def components_of(pipe: Any) -> dict[str, nn.Module]:
    names = ("unet", "transformer", "text_encoder", "text_encoder_2", "text_encoder_3")
    found = {name: getattr(pipe, name, None) for name in names}
    return {name: net for name, net in found.items() if net is not None}


def make_adapter(
    pipe: Any, cid: str, endings: Sequence[str], *, rank: int = 4, components: Sequence[str] = ()
) -> ImageAdapter:
    """Random deltas of the modules whose paths end so; `components`: empty for all."""
    generator = torch.Generator().manual_seed(sum(map(ord, cid)) + rank)
    made: dict[str, dict[str, LowRank]] = {}
    for component, net in components_of(pipe).items():
        if components and component not in components:
            continue
        for path, module in net.named_modules():
            if isinstance(module, nn.Linear | nn.Conv2d) and path.endswith(tuple(endings)):
                shape = module.weight.shape
                a = torch.randn(rank, *shape[1:], generator=generator)
                b = torch.randn(shape[0], rank, generator=generator)
                pair = LowRank(a * module.weight[0].numel() ** -0.5, b * 0.4)
                made.setdefault(component, {})[path] = pair
    return ImageAdapter(cid=cid, components=made)


def with_parts(pipe: Any) -> tuple[ImageAdapter, ...]:
    """Adapters with biases beside matrices, with biases alone, and with Kronecker factors."""
    random = torch.Generator().manual_seed(11)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random) * 0.3

    biased = make_adapter(pipe, "biased", (*ATTENTION, *FEED_FORWARD), rank=2)
    return (
        _changed(biased, "biased", lambda p: replace(p, bias=rand(len(p.b)))),
        _changed(biased, "alone", lambda p: LowRank(p.a[:0], p.b[:, :0], bias=rand(len(p.b)))),
        _changed(
            biased,
            "factors",
            lambda p: Kronecker(
                rand(len(p.b) // 2 + 1, 1 + (p.a.shape[1] % 2 == 0)),
                rand(2, p.a.shape[1] // (1 + (p.a.shape[1] % 2 == 0)), *p.a.shape[2:]) * 0.2,
                num_rows=len(p.b),
                skip=1,
                bias=rand(len(p.b)),
            ),
        ),
    )


def _changed(
    adapter: ImageAdapter, cid: str, change: Callable[[Any], LowRank | Kronecker]
) -> ImageAdapter:
    components = {
        component: {path: change(pair) for path, pair in modules.items()}
        for component, modules in adapter.components.items()
    }
    return ImageAdapter(cid=cid, components=components)


def peft_tensors(adapter: ImageAdapter) -> dict[str, Tensor]:
    """Return the adapter in the names of diffusers."""
    tensors = {}
    for component, modules in adapter.components.items():
        for path, pair in modules.items():
            b = pair.b if pair.a.dim() == 2 else pair.b[:, :, None, None]
            tensors[f"{component}.{path}.lora_A.weight"] = pair.a.contiguous()
            tensors[f"{component}.{path}.lora_B.weight"] = b.contiguous()
    return tensors


def random_lengths(weight: Tensor, seed: int) -> Tensor:
    """DoRA magnitudes that are off from the lengths of the rows by up to 40 %."""
    factors = 0.6 + 0.8 * torch.rand(len(weight), generator=torch.Generator().manual_seed(seed))
    return weight.detach().flatten(1).norm(dim=1) * factors


def dora_tensors(pipe: Any, adapter: ImageAdapter) -> dict[str, Tensor]:
    """Return the adapter in the names of diffusers, with magnitudes."""
    tensors = peft_tensors(adapter)
    for component, modules in adapter.components.items():
        for path in modules:
            weight = getattr(pipe, component).get_submodule(path).weight
            shape = (-1,) if weight.dim() == 2 else (1, -1, 1, 1)
            lengths = random_lengths(weight, sum(map(ord, path)))
            tensors[f"{component}.{path}.lora_magnitude_vector"] = lengths.view(shape)
    return tensors


def load_stock_lora(pipe: Any, source: dict[str, Tensor] | Path, name: str) -> None:
    """Load tensors or a file with diffusers, without its warnings about files and modules."""
    transformers_logging.disable_progress_bar()
    kept = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = str(source) if isinstance(source, Path) else dict(source)
        pipe.load_lora_weights(given, adapter_name=name)
    transformers_logging.set_verbosity(kept)


def picture_file(
    seed: int = 0, size: tuple[int, int] = (SIZE, SIZE), mode: str = "RGB", kind: str = "PNG"
) -> bytes:
    """Return a file with smooth random colours."""
    noise = np.random.default_rng(seed).integers(0, 256, (4, 4, len(mode)), dtype=np.uint8)
    small = Image.fromarray(noise.squeeze(), mode)
    return file_of(small.resize(size, Image.Resampling.BICUBIC), kind)


def mask_file(size: tuple[int, int] = (SIZE, SIZE), kind: str = "PNG") -> bytes:
    """White in its right half."""
    mask = Image.new("L", size, 0)
    mask.paste(255, (size[0] // 2, 0, *size))
    return file_of(mask, kind)


def file_of(image: Image.Image, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


def open_image(data: bytes) -> Image.Image:
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        return image


def request_for(name: str, request_id: str, **fields: Any) -> ImageRequest:
    """Return a request of 32x32 pixels with the family's options."""
    given = {
        "prompt": f"a {request_id} hill",
        "width": SIZE,
        "height": SIZE,
        "steps": 3,
        "seed": sum(map(ord, request_id)),
        "max_sequence_length": STOCK_OPTIONS[name].get("max_sequence_length"),
    }
    return ImageRequest(request_id=request_id, **(given | fields))


def draw_all(
    engine: ImageEngine, requests: Sequence[ImageRequest], *, check: bool = True
) -> dict[str, Tensor]:
    """Draws the requests together; raises the error of the first that fails."""
    for request in requests:
        engine.add(copy.copy(request))
    return finish(engine, check=check)


def finish(engine: ImageEngine, *, check: bool = True) -> dict[str, Tensor]:
    events: list[ImageEvent] = []
    while engine.has_work:
        events += engine.step()
        if check:
            engine.check_integrity()
    for event in events:
        if event.error is not None:
            raise event.error
    return {event.request_id: event.pixels for event in events if event.pixels is not None}


def rand_tensors(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))
