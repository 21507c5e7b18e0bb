"""Reference of LoRA on augmented weights: h stands behind the outputs in y."""

from __future__ import annotations

from torch import Tensor

from loramux.kernels.gpu.lora.work_list import ALIGN_ELEMENTS
from loramux.kernels.gpu.lora_augmented.tables import AugmentedSite, AugmentedWeights
from loramux.kernels.ops import KVTarget, Norm, Rotation
from loramux.kernels.reference import elementwise as fused_torch
from loramux.kernels.reference import lora_segmented
from loramux.kernels.reference.fp12 import read_fp12


def copy_block(  # noqa: PLR0913
    weights: AugmentedWeights,
    pool: Tensor,
    directory: Tensor,
    slots: Tensor,
    *,
    rank_block: tuple[int, int],
    block: int,
) -> None:
    """Copy A of one rank block (slot, index) to block `block` of every augmented weight.

    Projections that the adapter does not change are cleared.   pool [pages, elements]
    directory int32 [layers, blocks, 4]   slots int32 [slots, 8 projections, 2]
    """
    slot, index = rank_block
    flat = pool.view(-1)
    for layer, of_layer in enumerate(weights.weights):
        projection = 0
        for weight in of_layer:
            for part in range(weight.shape[1]):
                target = weight[block, part]
                target.zero_()
                first, count = slots[slot, projection].tolist()
                projection += 1
                if index < count:
                    address, _, ranks, _ = directory[layer, first + index].tolist()
                    start, width = address * ALIGN_ELEMENTS, target.shape[1]
                    if weights.is_fp12:
                        target[:ranks] = read_fp12(pool, start, ranks, width)
                    else:
                        rows = flat[start : start + ranks * width]
                        target[:ranks] = rows.view(ranks, width)


def add_norm(
    y: Tensor, residual: Tensor, norm: Norm, after: Norm | None, lora: AugmentedSite
) -> Tensor:
    """add_norm of y with its adapters. y [rows, outputs + appended rows]

    y may be split-K partial sums, float32 [splits, rows, outputs + appended rows]
    """
    return fused_torch.add_norm(_expanded(y, lora), residual, norm, after)


def expand(y: Tensor, lora: AugmentedSite) -> Tensor:
    """y with its adapters [rows, outputs], for a site of one projection.

    y [rows, outputs + appended rows] is updated in place; split-K partial sums, float32
    [splits, rows, outputs + appended rows], are not changed.
    """
    return _expanded(y, lora)


def rotate_write(y: Tensor, rotation: Rotation, target: KVTarget, lora: AugmentedSite) -> Tensor:
    """rotate_write of y with its adapters. y [rows, outputs + appended rows]"""
    return fused_torch.rotate_write(_expanded(y, lora), rotation, target)


def activate_mul(y: Tensor, activation: str, lora: AugmentedSite) -> Tensor:
    """activate_mul of y with its adapters. y [rows, outputs + appended rows]"""
    return fused_torch.activate_mul(_expanded(y, lora), activation)


def _expanded(y: Tensor, lora: AugmentedSite) -> Tensor:
    if y.ndim == 3:
        y = fused_torch.reduce_splits(y, lora.pool.dtype)
    lora_segmented.expand_augmented(lora.tables, lora.pool, y, lora.layer, lora.site)
    return y[:, : lora.num_outputs]
