"""The layout of the KV cache in pages, in bytes."""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """A KV page: [layers, key and value, block_tokens, kv_heads, head_dim], then the scales.

    Scales are [layers, key and value, block_tokens, kv_heads]. Kernels read the dtype from the
    pages that they are given.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str = "float32"
    scale_bytes: int = 0
    """Bytes of the scale of each token and head; 0: keys and values have no scales."""

    @property
    def token_elements(self) -> int:
        """Elements of one token's keys (or values) in one layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_elements(self) -> int:
        """Elements of a page's keys and values; scales and padding lie behind them."""
        return self.num_layers * 2 * self.block_tokens * self.token_elements

    @property
    def page_bytes(self) -> int:
        num_scales = self.num_elements // self.head_dim
        return self.num_elements * DTYPE_BYTES[self.dtype] + num_scales * self.scale_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values, with their scales, over all layers."""
        return self.page_bytes // self.block_tokens
