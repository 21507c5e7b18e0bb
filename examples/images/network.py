"""The demo's FLUX pipeline: a small one, with random weights until it is trained."""

from __future__ import annotations

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config
from transformers import T5EncoderModel as T5

from examples.images.autoencoder import LATENT_CHANNELS, make_autoencoder

TEXT_TOKENS = 12
SPECIAL = PAD, UNKNOWN, BEGIN, END = ("<pad>", "<unk>", "<s>", "</s>")


def make_tokenizer(captions: list[str]) -> PreTrainedTokenizerFast:
    """Make a tokenizer with a token for each word of the captions."""
    words = sorted({word for caption in captions for word in caption.split()})
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *words])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A {END}", special_tokens=[(BEGIN, 2), (END, 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        unk_token=UNKNOWN,
        bos_token=BEGIN,
        eos_token=END,
        model_max_length=TEXT_TOKENS,
    )


def make_pipeline(tokenizer: PreTrainedTokenizerFast) -> FluxPipeline:
    clip = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        projection_dim=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=TEXT_TOKENS,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
    )
    t5 = T5Config(
        vocab_size=len(tokenizer),
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_layers=1,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=3,
    )
    torch.manual_seed(0)
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=make_autoencoder(),
        text_encoder=CLIPTextModel(clip),
        tokenizer=tokenizer,
        text_encoder_2=T5(t5),
        tokenizer_2=tokenizer,
        transformer=FluxTransformer2DModel(
            patch_size=1,
            in_channels=4 * LATENT_CHANNELS,
            num_layers=2,
            num_single_layers=4,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=128,
            pooled_projection_dim=64,
            guidance_embeds=False,
            axes_dims_rope=(8, 12, 12),
        ),
    )


def pack(latents: torch.Tensor) -> torch.Tensor:
    """[rows, channels, height, width] -> tokens [rows, height/2 * width/2, 4 * channels]"""
    rows, channels, height, width = latents.shape
    tiles = latents.view(rows, channels, height // 2, 2, width // 2, 2)
    return tiles.permute(0, 2, 4, 1, 3, 5).reshape(rows, height * width // 4, channels * 4)


def positions(side: int, device: torch.device) -> torch.Tensor:
    """Ids [side * side, 3] of the image's tokens, as FluxPipeline makes them."""
    place = torch.arange(side, device=device, dtype=torch.float32)
    row, column = place.repeat_interleave(side), place.repeat(side)
    return torch.stack([torch.zeros_like(row), row, column], 1)
