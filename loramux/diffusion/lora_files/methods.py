"""Turns the tensors of one module into one low-rank pair."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from loramux.adapters.images.keys import LOHA, Role
from loramux.adapters.peft.refusals import RefusalCode
from loramux.errors import AdapterRefused

Parts = Mapping[Role, Tensor]


def low_rank(name: str, parts: Parts) -> tuple[Tensor, Tensor, int]:
    """Returns (A, B, the rank that alpha refers to); A is [rank, in, ...], B [out, rank]."""
    roles = set(parts)
    if roles == set(LOHA):
        return _hadamard(name, parts)
    if roles == {Role.A, Role.B, Role.MID}:
        return _tucker(name, parts)
    if roles != {Role.A, Role.B}:
        found = ", ".join(sorted(roles)) or "alpha alone"
        raise AdapterRefused(
            RefusalCode.INCOMPLETE_PAIR,
            f"{name} has {found}, which is not a whole pair.",
            fix="Save the adapter again.",
        )
    a, b = parts[Role.A], parts[Role.B]
    return a, _flat_b(name, a, b), len(a)


def magnitude(name: str, parts: Parts) -> Tensor | None:
    """Returns the DoRA magnitude of each output row; None without DoRA."""
    found, theirs = parts.get(Role.MAGNITUDE), parts.get(Role.DORA)
    if theirs is not None:
        if found is not None or theirs.numel() != len(theirs):
            raise AdapterRefused(
                RefusalCode.DORA_TENSORS,
                f"{name}.dora_scale {list(theirs.shape)} is not one magnitude of each output row; "
                "others are not served.",
                fix="Train it with magnitudes of output rows (wd_on_output of LyCORIS).",
            )
        found = theirs
    return None if found is None else found.flatten()


def _flat_b(name: str, a: Tensor, b: Tensor) -> Tensor:
    flat = b.flatten(1) if b.dim() > 1 else b
    if a.dim() < 2 or flat.dim() != 2 or flat.shape[1] != len(a) or not len(a):
        raise wrong_shape(f"{name} has A {list(a.shape)} and B {list(b.shape)}, which do not match")
    return flat


def _tucker(name: str, parts: Parts) -> tuple[Tensor, Tensor, int]:
    """Folds mid into A: a k x k convolution after a 1 x 1 one is a k x k convolution."""
    a, mid = parts[Role.A], parts[Role.MID]
    if mid.dim() != 4 or mid.shape[1] != len(a) or a.flatten(1).shape[1] != a.shape[1]:
        raise wrong_shape(f"{name} has A {list(a.shape)} and mid {list(mid.shape)}")
    folded = torch.einsum("rshw,si->rihw", mid, a.flatten(1))
    return folded, _flat_b(name, folded, parts[Role.B]), len(a)


def _hadamard(name: str, parts: Parts) -> tuple[Tensor, Tensor, int]:
    """Writes (w1a w1b) * (w2a w2b) as one pair: its ranks are pairs of the two ranks."""
    w1a, w1b, w2a, w2b = (parts[role] for role in LOHA)
    if any(part.dim() != 2 for part in (w1a, w1b, w2a, w2b)) or (
        w1a.shape[1] != len(w1b)
        or w2a.shape[1] != len(w2b)
        or w1a.shape[0] != w2a.shape[0]
        or w1b.shape[1] != w2b.shape[1]
    ):
        raise wrong_shape(f"the LoHa factors of {name} do not match")
    rank = len(w1b)
    out_features, in_features = w1a.shape[0], w1b.shape[1]
    if rank * len(w2b) < min(out_features, in_features):
        a = (w1b[:, None] * w2b[None]).flatten(0, 1)
        b = (w1a[:, :, None] * w2a[:, None]).flatten(1)
        return a, b, rank
    # A pair of full rank is smaller than the pairs of ranks.
    delta = (w1a @ w1b) * (w2a @ w2b)
    if in_features <= out_features:
        return torch.eye(in_features), delta, rank
    return delta, torch.eye(out_features), rank


def wrong_shape(reason: str) -> AdapterRefused:
    return AdapterRefused(
        RefusalCode.WRONG_SHAPE,
        f"{reason[0].upper()}{reason[1:]}.",
        fix="Use an adapter that was trained on this base.",
    )
