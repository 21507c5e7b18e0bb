"""Turns the tensors of one module into one low-rank pair or one Kronecker product."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loramux.adapters.images.keys import LOHA, LOKR, Role, is_whole
from loramux.adapters.peft.refusals import RefusalCode
from loramux.diffusion.adapter import Kronecker, LowRank
from loramux.errors import AdapterRefused

Parts = Mapping[Role, Tensor]
# A full matrix takes twice its size as a pair; a wider one would be larger than all of LoRA.
_MAX_FULL_RANK = 256
# A pair runs in the kernels of a GPU, and up to this rank it is not much larger than the factors.
_MAX_KRONECKER_RANK = 128


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """The delta B @ A of the rows of all modules that a name stands for."""

    a: Tensor
    """[rank, in, ...]"""
    b: Tensor
    """[out, rank]"""
    rank: int | None
    """The rank that alpha refers to; None: alpha has no meaning."""

    @property
    def num_rows(self) -> int:
        return len(self.b)

    def scaled(self, factor: float) -> Pair:
        return replace(self, b=self.b * factor)

    def swapped(self) -> Pair:
        """Return it with the other half of the rows first."""
        return replace(self, b=torch.cat(self.b.chunk(2)[::-1]))

    def part(self, name: str, weight: Tensor, start: int) -> LowRank:
        """Return the rows of one module from `start` on; raise AdapterRefused."""
        rows = self.b[start : start + len(weight)]
        return LowRank(_fitted(name, self.a, weight), rows.contiguous())


@dataclass(frozen=True, slots=True, eq=False)
class KroneckerFactors:
    """The Kronecker product of the rows of all modules that a name stands for."""

    name: str
    left: Tensor
    right: Tensor
    """[out 2, in 2], or with the axes of a convolution as they are in the file."""
    rank: int | None

    @property
    def num_rows(self) -> int:
        return len(self.left) * len(self.right)

    def scaled(self, factor: float) -> KroneckerFactors:
        return replace(self, left=self.left * factor)

    def swapped(self) -> KroneckerFactors | Pair:
        if len(self.left) % 2 == 0:
            return replace(self, left=torch.cat(self.left.chunk(2)[::-1]))
        delta = torch.kron(self.left, self.right.flatten(1))
        return _full(self.name, delta, self.rank).swapped()

    def part(self, name: str, weight: Tensor, start: int) -> Kronecker:
        height, columns = len(self.right), self.left.shape[1]
        first, last = start // height, -(-(start + len(weight)) // height)
        shape = (weight.shape[1] // columns, *weight.shape[2:])
        right = self.right.flatten(1)
        if weight.shape[1] % columns or right.shape[1] != math.prod(shape):
            raise wrong_shape(
                f"{name} is for a layer with {columns * right.shape[1]} inputs, and this model's "
                f"has {list(weight.shape[1:])}"
            )
        return Kronecker(
            self.left[first:last].contiguous(),
            right.reshape(height, *shape).contiguous(),
            len(weight),
            start - first * height,
        )


def read_factors(name: str, parts: Parts) -> Pair | KroneckerFactors | None:
    """Return the delta of the weight, without the scale; None if the bias alone changes."""
    roles = set(parts)
    if not is_whole(roles):
        found = ", ".join(sorted(roles)) or "alpha alone"
        raise AdapterRefused(
            RefusalCode.INCOMPLETE_PAIR,
            f"{name} has {found}, which is not a whole pair.",
            fix="Save the adapter again.",
        )
    if roles & LOKR:
        return _kronecker(name, parts)
    if roles & {*LOHA}:
        return _hadamard(name, parts)
    if Role.MID in roles:
        return _tucker(name, parts)
    if Role.DIFF in roles:
        delta = parts[Role.DIFF]
        if delta.dim() < 2:
            raise wrong_shape(f"{name}.diff has the shape {list(delta.shape)}")
        return _full(name, delta, None)
    if Role.A in roles:
        a, b = parts[Role.A], parts[Role.B]
        return Pair(a, _flat_b(name, a, b), len(a))
    return None


def magnitude(name: str, parts: Parts) -> Tensor | None:
    """Return the DoRA magnitude of each output row; None without DoRA."""
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


def _full(name: str, delta: Tensor, rank: int | None) -> Pair:
    """Return a whole matrix as a pair, if it is small enough."""
    if min(delta.flatten(1).shape) > _MAX_FULL_RANK:
        raise AdapterRefused(
            RefusalCode.FULL_WEIGHTS,
            f"{name} is a full difference of {list(delta.shape)}, which takes more memory than a "
            f"LoRA of all layers; up to a rank of {_MAX_FULL_RANK} they are served.",
            fix="Extract a LoRA from it.",
        )
    return _full_rank(delta, rank)


def _full_rank(delta: Tensor, rank: int | None) -> Pair:
    flat = delta.flatten(1)
    rows, columns = flat.shape
    if columns <= rows:
        return Pair(torch.eye(columns).view(columns, *delta.shape[1:]), flat, rank)
    return Pair(delta, torch.eye(rows), rank)


def _flat_b(name: str, a: Tensor, b: Tensor) -> Tensor:
    flat = b.flatten(1) if b.dim() > 1 else b
    if a.dim() < 2 or flat.dim() != 2 or flat.shape[1] != len(a) or not len(a):
        raise wrong_shape(f"{name} has A {list(a.shape)} and B {list(b.shape)}, which do not match")
    return flat


def _tucker(name: str, parts: Parts) -> Pair:
    """Folds mid into A: a k x k convolution after a 1 x 1 one is a k x k convolution."""
    a, mid = parts[Role.A], parts[Role.MID]
    if mid.dim() != 4 or mid.shape[1] != len(a) or a.flatten(1).shape[1] != a.shape[1]:
        raise wrong_shape(f"{name} has A {list(a.shape)} and mid {list(mid.shape)}")
    folded = torch.einsum("rshw,si->rihw", mid, a.flatten(1))
    return Pair(folded, _flat_b(name, folded, parts[Role.B]), len(a))


def _hadamard(name: str, parts: Parts) -> Pair:
    """Write (w1a w1b) * (w2a w2b) as one pair: its ranks are pairs of the two ranks."""
    w1a, w1b, w2a, w2b = (parts[role] for role in LOHA)
    if any(part.dim() != 2 for part in (w1a, w1b, w2a, w2b)) or (
        w1a.shape[1] != len(w1b)
        or w2a.shape[1] != len(w2b)
        or w1a.shape[0] != w2a.shape[0]
        or w1b.shape[1] != w2b.shape[1]
    ):
        raise wrong_shape(f"The LoHa factors of {name} do not match")
    rank = len(w1b)
    out_features, in_features = w1a.shape[0], w1b.shape[1]
    if rank * len(w2b) < min(out_features, in_features):
        a = (w1b[:, None] * w2b[None]).flatten(0, 1)
        b = (w1a[:, :, None] * w2a[:, None]).flatten(1)
        return Pair(a, b, rank)
    # A pair of full rank is smaller than the pairs of ranks.
    return _full_rank((w1a @ w1b) * (w2a @ w2b), rank)


def _kronecker(name: str, parts: Parts) -> Pair | KroneckerFactors:
    """LoKr: the Kronecker product of two matrices, each whole or a product itself.

    If the ranks are small, kron(b1 a1, b2 a2) = kron(b1, b2) kron(a1, a2) is a pair.
    """
    first = _halves(name, parts, Role.LOKR_W1, Role.LOKR_W1_A, Role.LOKR_W1_B)
    if Role.LOKR_T2 in parts:
        core, a, b = parts[Role.LOKR_T2], parts[Role.LOKR_W2_A], parts[Role.LOKR_W2_B]
        if core.dim() != 4 or (a.dim(), b.dim()) != (2, 2) or core.shape[:2] != (len(a), len(b)):
            raise wrong_shape(f"The LoKr factors of {name} do not match")
        whole = torch.einsum("ijhw,ip,jr->prhw", core, a, b)
        return KroneckerFactors(name, _joined(first), whole, len(b))
    second = _halves(name, parts, Role.LOKR_W2, Role.LOKR_W2_A, Role.LOKR_W2_B)
    ranks = [len(half[1]) for half in (second, first) if len(half) == 2]
    rank = ranks[0] if ranks else None
    if len(second) == 2:
        left = first if len(first) == 2 else _with_eye(first[0])
        if len(left[1]) * len(second[1]) <= _MAX_KRONECKER_RANK:
            b, a = torch.kron(left[0], second[0]), torch.kron(left[1], second[1].flatten(1))
            return Pair(a, b, rank)
    return KroneckerFactors(name, _joined(first), _joined(second), rank)


def _halves(name: str, parts: Parts, whole: Role, b: Role, a: Role) -> tuple[Tensor, ...]:
    """Return a factor as it is in the file: one matrix, or two whose product it is."""
    if whole in parts:
        only = parts[whole]
        if only.dim() < 2 or not only.numel() or (whole is Role.LOKR_W1 and only.dim() != 2):
            raise wrong_shape(f"{name}.{whole} has the shape {list(only.shape)}")
        return (only,)
    left, right = parts[b], parts[a]
    is_matrix = left.dim() == 2 and right.dim() == 2 and left.numel() and right.numel()
    if not is_matrix or left.shape[1] != len(right):
        raise wrong_shape(
            f"{name} has {b} {list(left.shape)} and {a} {list(right.shape)}, which do not match"
        )
    return left, right


def _joined(halves: tuple[Tensor, ...]) -> Tensor:
    return halves[0] if len(halves) == 1 else halves[0] @ halves[1]


def _with_eye(matrix: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = matrix.shape
    return (torch.eye(rows), matrix) if rows <= columns else (matrix, torch.eye(columns))


def _fitted(name: str, a: Tensor, weight: Tensor) -> Tensor:
    """Return A in the shape of the layer; 1 x 1 convolutions and linear layers are the same."""
    wanted = weight.shape[1:]
    is_same_size = a[0].numel() == wanted.numel() and (
        a.dim() == 2 or a.shape[1:] == wanted or a.shape[1] == wanted.numel()
    )
    if not is_same_size:
        raise wrong_shape(
            f"{name} is for a layer with inputs {list(a.shape[1:])}, and this model's has "
            f"{list(wanted)}"
        )
    return a.reshape(len(a), *wanted).contiguous()


def wrong_shape(reason: str) -> AdapterRefused:
    return AdapterRefused(
        RefusalCode.WRONG_SHAPE, f"{reason}.", fix="Use an adapter that was trained on this base."
    )
