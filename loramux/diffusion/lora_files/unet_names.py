"""Names of a UNet's modules elsewhere: original (sgm) blocks, and old attention processors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_RENAMED = {
    "conv_in": "input_blocks.0.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}
_RESNET = {
    "conv1": "in_layers.2",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}
_BLOCK = re.compile(
    r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.+)"
)
_MID = re.compile(r"mid_block\.(resnets|attentions)\.(\d+)\.(.+)")
_PROCESSOR = re.compile(r"(.+\.attn\d?)\.(to_[qkv]|to_out)(?:\.0)?")


def sgm_names(paths: Iterable[str], layers_per_block: int) -> Mapping[str, str]:
    """Return the original UNet's name of each module path.

    There, each resnet with its attention is a block of its own, and so is each downsampler;
    an upsampler is the last part of the block before it.
    """
    paths = list(paths)
    with_attention = {
        found[2] for path in paths if (found := _BLOCK.fullmatch(path)) and _is_up_attention(found)
    }
    return {path: _sgm_name(path, layers_per_block, with_attention) for path in paths}


def _is_up_attention(found: re.Match[str]) -> bool:
    return found[1] == "up" and found[3] == "attentions"


def _sgm_name(path: str, layers: int, with_attention: set[str]) -> str:
    if path in _RENAMED:
        return _RENAMED[path]
    mid = _MID.fullmatch(path)
    if mid is not None:
        kind, index, rest = mid[1], int(mid[2]), mid[3]
        number = 1 + 2 * index if kind == "attentions" else 2 * index
        return f"middle_block.{number}.{_part(kind, rest)}"
    found = _BLOCK.fullmatch(path)
    if found is None:
        return path
    side, block, kind, index, rest = found[1], int(found[2]), found[3], int(found[4]), found[5]
    place = int(kind == "attentions")
    if side == "down":
        first = 1 + block * (layers + 1)
        if kind == "downsamplers":
            return f"input_blocks.{first + layers}.0.op"
        return f"input_blocks.{first + index}.{place}.{_part(kind, rest)}"
    first = block * (layers + 1)
    if kind == "upsamplers":
        return f"output_blocks.{first + layers}.{1 + (found[2] in with_attention)}.conv"
    return f"output_blocks.{first + index}.{place}.{_part(kind, rest)}"


def _part(kind: str, rest: str) -> str:
    return _RESNET.get(rest, rest) if kind == "resnets" else rest


def processor_name(path: str) -> str:
    """Return the name of an attention's module in old diffusers: attn1.processor.to_q."""
    found = _PROCESSOR.fullmatch(path)
    return path if found is None else f"{found[1]}.processor.{found[2]}"
