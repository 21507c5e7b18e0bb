"""Module names of the original releases of transformers, as kohya, ComfyUI and XLabs use them.

A fused matrix of the original is several modules of diffusers, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple


class Original(NamedTuple):
    name: str
    paths: tuple[str, ...]
    style: str = "original names"
    swaps_halves: bool = False
    """The original has shift and scale in the other order."""


def flux_names(net: Any) -> Iterator[Original]:
    yield from _flux_ends("time_text_embed")
    yield from _flux_embedder("vector", "time_text_embed.text")
    for index in range(len(net.transformer_blocks)):
        yield from _flux_double(f"double_blocks.{index}", f"transformer_blocks.{index}")
    for index in range(len(net.single_transformer_blocks)):
        yield from _flux_single(f"single_blocks.{index}", f"single_transformer_blocks.{index}")


def _flux_ends(embedders: str) -> Iterator[Original]:
    """Yield the modules before and after the blocks, which FLUX.1 and FLUX.2 have."""
    yield Original("img_in", ("x_embedder",))
    yield Original("txt_in", ("context_embedder",))
    yield Original("final_layer.linear", ("proj_out",))
    yield Original("final_layer.adaLN_modulation.1", ("norm_out.linear",), swaps_halves=True)
    yield from _flux_embedder("time", f"{embedders}.timestep")
    yield from _flux_embedder("guidance", f"{embedders}.guidance")


def _flux_embedder(theirs: str, ours: str) -> Iterator[Original]:
    yield Original(f"{theirs}_in.in_layer", (f"{ours}_embedder.linear_1",))
    yield Original(f"{theirs}_in.out_layer", (f"{ours}_embedder.linear_2",))


def _flux_double(theirs: str, ours: str) -> Iterator[Original]:
    streams = (
        ("img", "1", ("to_q", "to_k", "to_v"), "to_out.0", "ff", "norm1"),
        ("txt", "2", ("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out", "ff_context", ""),
    )
    for stream, number, parts, out, feed_forward, norm in streams:
        qkv = tuple(f"{ours}.attn.{part}" for part in parts)
        projection = (f"{ours}.attn.{out}",)
        yield Original(f"{theirs}.{stream}_attn.qkv", qkv)
        yield Original(f"{theirs}.{stream}_attn.proj", projection)
        yield Original(f"{theirs}.processor.qkv_lora{number}", qkv, "XLabs")
        yield Original(f"{theirs}.processor.proj_lora{number}", projection, "XLabs")
        yield Original(f"{theirs}.{stream}_mlp.0", (f"{ours}.{feed_forward}.net.0.proj",))
        yield Original(f"{theirs}.{stream}_mlp.2", (f"{ours}.{feed_forward}.net.2",))
        yield Original(f"{theirs}.{stream}_mod.lin", (f"{ours}.{norm or 'norm1_context'}.linear",))


def _flux_single(theirs: str, ours: str) -> Iterator[Original]:
    qkv = tuple(f"{ours}.attn.{part}" for part in ("to_q", "to_k", "to_v"))
    yield Original(f"{theirs}.linear1", (*qkv, f"{ours}.proj_mlp"))
    yield Original(f"{theirs}.linear2", (f"{ours}.proj_out",))
    yield Original(f"{theirs}.modulation.lin", (f"{ours}.norm.linear",))
    yield Original(f"{theirs}.processor.qkv", qkv, "XLabs")
    yield Original(f"{theirs}.processor.proj", (f"{ours}.proj_out",), "XLabs")


def flux2_names(net: Any) -> Iterator[Original]:
    yield from _flux_ends("time_guidance_embed")
    for name in (
        "double_stream_modulation_img",
        "double_stream_modulation_txt",
        "single_stream_modulation",
    ):
        yield Original(f"{name}.lin", (f"{name}.linear",))
    for index in range(len(net.transformer_blocks)):
        yield from _flux2_double(f"double_blocks.{index}", f"transformer_blocks.{index}")
    for index in range(len(net.single_transformer_blocks)):
        theirs, ours = f"single_blocks.{index}", f"single_transformer_blocks.{index}.attn"
        yield Original(f"{theirs}.linear1", (f"{ours}.to_qkv_mlp_proj",))
        yield Original(f"{theirs}.linear2", (f"{ours}.to_out",))


def _flux2_double(theirs: str, ours: str) -> Iterator[Original]:
    streams = (
        ("img", ("to_q", "to_k", "to_v"), "to_qkv", "to_out.0", "ff"),
        (
            "txt",
            ("add_q_proj", "add_k_proj", "add_v_proj"),
            "to_added_qkv",
            "to_add_out",
            "ff_context",
        ),
    )
    for stream, parts, fused, out, feed_forward in streams:
        qkv = tuple(f"{ours}.attn.{part}" for part in parts)
        pairs = (
            (f"{stream}_attn.proj", f"attn.{out}"),
            (f"{stream}_mlp.0", f"{feed_forward}.linear_in"),
            (f"{stream}_mlp.2", f"{feed_forward}.linear_out"),
        )
        yield Original(f"{theirs}.{stream}_attn.qkv", qkv)
        yield Original(f"{ours}.attn.{fused}", qkv, "fused projections")
        for name, path in pairs:
            yield Original(f"{theirs}.{name}", (f"{ours}.{path}",))
        # Some trainers cut the name so.
        for path in (*(f"attn.{part}" for part in parts), *(path for _, path in pairs)):
            cut = ours.replace("transformer_blocks", "sformer_blocks")
            yield Original(f"{cut}.{path}", (f"{ours}.{path}",), "cut names")


def wan_names(net: Any) -> Iterator[Original]:
    embedder = "condition_embedder"
    yield Original("text_embedding.0", (f"{embedder}.text_embedder.linear_1",))
    yield Original("text_embedding.2", (f"{embedder}.text_embedder.linear_2",))
    yield Original("time_embedding.0", (f"{embedder}.time_embedder.linear_1",))
    yield Original("time_embedding.2", (f"{embedder}.time_embedder.linear_2",))
    yield Original("time_projection.1", (f"{embedder}.time_proj",))
    yield Original("head.head", ("proj_out",))
    for index in range(len(net.blocks)):
        block = f"blocks.{index}"
        for theirs, ours in (("self_attn", "attn1"), ("cross_attn", "attn2")):
            for part in "qkv":
                yield Original(f"{block}.{theirs}.{part}", (f"{block}.{ours}.to_{part}",))
            yield Original(f"{block}.{theirs}.o", (f"{block}.{ours}.to_out.0",))
        yield Original(f"{block}.ffn.0", (f"{block}.ffn.net.0.proj",))
        yield Original(f"{block}.ffn.2", (f"{block}.ffn.net.2",))


def z_image_names(net: Any) -> Iterator[Original]:
    for group in ("layers", "noise_refiner", "context_refiner"):
        for index in range(len(getattr(net, group))):
            block = f"{group}.{index}.attention"
            qkv = tuple(f"{block}.to_{part}" for part in "qkv")
            yield Original(f"{block}.qkv", qkv)
            yield Original(f"{block}.out", (f"{block}.to_out.0",))
            for part, path in zip("qkv", qkv, strict=True):
                yield Original(f"{block}.to.{part}", (path,))


ORIGINALS = {
    "FluxTransformer2DModel": flux_names,
    "Flux2Transformer2DModel": flux2_names,
    "WanTransformer3DModel": wan_names,
    "ZImageTransformer2DModel": z_image_names,
}
"""By the class of the denoiser."""
