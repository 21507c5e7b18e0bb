"""The demo's FLUX pipeline: a small one, with random weights until it is trained."""

from __future__ import annotations

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config
from transformers import T5EncoderModel as T5

TEXT_TOKENS = 24
VOCABULARY = 2048
LATENT_CHANNELS = 8
SPECIAL = PAD, UNKNOWN, BEGIN, END = ("<pad>", "<unk>", "<s>", "</s>")


def make_tokenizer(captions: list[str]) -> PreTrainedTokenizerFast:
    """Train a BPE tokenizer whose tokens of a word do not depend on its neighbours."""
    core = Tokenizer(models.BPE(unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.train_from_iterator(
        captions, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=list(SPECIAL))
    )
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
        vocab_size=VOCABULARY,
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
        vocab_size=VOCABULARY,
        d_model=192,
        d_kv=32,
        d_ff=384,
        num_layers=2,
        num_heads=6,
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=3,
    )
    torch.manual_seed(0)
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=AutoencoderKL(
            block_out_channels=(32, 64, 64),
            down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
            layers_per_block=1,
            latent_channels=LATENT_CHANNELS,
            norm_num_groups=8,
            mid_block_add_attention=False,
            use_quant_conv=False,
            use_post_quant_conv=False,
            scaling_factor=1.0,
            shift_factor=0.0,
        ),
        text_encoder=CLIPTextModel(clip),
        tokenizer=tokenizer,
        text_encoder_2=T5(t5),
        tokenizer_2=tokenizer,
        transformer=FluxTransformer2DModel(
            patch_size=1,
            in_channels=4 * LATENT_CHANNELS,
            num_layers=3,
            num_single_layers=6,
            attention_head_dim=32,
            num_attention_heads=6,
            joint_attention_dim=192,
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


def unpack(tokens: torch.Tensor, side: int) -> torch.Tensor:
    """tokens -> [rows, channels, 2 * side, 2 * side]"""
    tiles = tokens.view(len(tokens), side, side, -1, 2, 2)
    return tiles.permute(0, 3, 1, 4, 2, 5).reshape(len(tokens), -1, 2 * side, 2 * side)


def positions(side: int, device: torch.device) -> torch.Tensor:
    """Ids [side * side, 3] of the image's tokens, as FluxPipeline makes them."""
    place = torch.arange(side, device=device, dtype=torch.float32)
    row, column = place.repeat_interleave(side), place.repeat(side)
    return torch.stack([torch.zeros_like(row), row, column], 1)
