"""Writes an image model with random weights and two LoRA files, to try the tools offline.

    python examples/images/make_tiny_model.py FOLDER

FOLDER/model is a FLUX pipeline of 0.2 million parameters, which draws noise in a second;
FOLDER/ink.safetensors has the names of diffusers, FOLDER/night.safetensors those of kohya.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)


def make_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Tokens are characters."""
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    vocab = {token: i for i, token in enumerate([*special, *map(chr, range(33, 127))])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split("", "isolated")]
    )
    core.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", model_max_length=max_length, **names
    )


def make_pipeline() -> FluxPipeline:
    clip = CLIPTextConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    t5 = T5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4)
    net = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=[4, 4, 8],
    )
    vae = AutoencoderKL(
        sample_size=32,
        block_out_channels=(4, 4),
        layers_per_block=1,
        latent_channels=1,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.06,
        scaling_factor=1.5,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        transformer=net.eval(),
        vae=vae.eval(),
        text_encoder=CLIPTextModel(clip).eval(),
        tokenizer=make_tokenizer(77),
        text_encoder_2=T5EncoderModel(t5).eval(),
        tokenizer_2=make_tokenizer(64),
    )


def make_lora(rank: int, seed: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Random matrices for two layers of the first block, 32 wide."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"attn.to_q": (32, 32), "ff.net.2": (128, 32)}
    return {
        f"transformer_blocks.0.{name}": (
            torch.randn(rank, wide, generator=generator) * wide**-0.5,
            torch.randn(out, rank, generator=generator),
        )
        for name, (wide, out) in shapes.items()
    }


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    make_pipeline().save_pretrained(folder / "model")
    ink, night = {}, {}
    for path, (a, b) in make_lora(4, 1).items():
        ink[f"transformer.{path}.lora_A.weight"] = a
        ink[f"transformer.{path}.lora_B.weight"] = b
    for path, (a, b) in make_lora(8, 2).items():
        name = f"lora_transformer_{path.replace('.', '_')}"
        night |= {f"{name}.lora_down.weight": a, f"{name}.lora_up.weight": b}
        night[f"{name}.alpha"] = torch.tensor(4.0)
    save_file(ink, folder / "ink.safetensors", {"modelspec.trigger_phrase": "ink drawing"})
    save_file(night, folder / "night.safetensors")
    print(f"wrote {folder / 'model'}, ink.safetensors and night.safetensors")


if __name__ == "__main__":
    main()
