"""Extras on the rows of a step, against the same maths on whole matrices."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loramux.adapters.packed.dense import DenseLayout
from loramux.adapters.packed.extras import MODEL_LEVEL, ExtraKey, ExtraKind, ExtraSpec
from loramux.adapters.packed.writers import write_extra
from loramux.adapters.peft.parts import ExtraTensor
from loramux.lora.batch import RowRun
from loramux.lora.extras import ExtrasSource, StepExtras
from loramux.memory.pool import PagePool
from loramux.memory.records import ResidentAdapter
from loramux.models.layers import Linear
from loramux.types.kv import KVLayout
from loramux.types.model import LinearSpec
from loramux.types.request import Selection

HIDDEN, VOCAB = 24, 50
QKV = LinearSpec("qkv", HIDDEN, ("q_proj", "k_proj", "v_proj"), (32, 16, 16))
GEOMETRY = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_tokens=4)
Parts = dict[ExtraKey, Tensor]


class Scene:
    """A pool with resident adapters whose pages are not adjacent."""

    def __init__(self) -> None:
        self.pool = PagePool(64, GEOMETRY.page_bytes, torch.device("cpu"))
        self.adapters: dict[str, ResidentAdapter] = {}
        self.source = ExtrasSource(
            self.pool.view(torch.float32), self.adapters, [QKV], num_layers=2
        )
        self._next_page = 63

    def add(self, cid: str, parts: Parts, token_ids: tuple[int, ...] = ()) -> None:
        specs = [
            ExtraSpec(*key, *values.shape, token_ids if key[2] is ExtraKind.ROWS else ())
            for key, values in parts.items()
        ]
        empty = DenseLayout(places={}, low_rank_elements=0, key=())
        layout = empty.with_extras(specs, GEOMETRY.num_elements)
        buffer = torch.full((layout.num_elements,), torch.nan)
        for key, values in parts.items():
            write_extra(layout.extras, buffer, ExtraTensor(key, values))
        # From the last page down, so that no two pages are adjacent in order.
        pages = [self._next_page - i for i in range(layout.extras.num_pages)]
        self._next_page -= len(pages)
        self.pool.write(pages, buffer)
        self.adapters[cid] = ResidentAdapter(cid, layout, pages)

    def step(self, *selections: Selection) -> StepExtras:
        """Two rows of each selection."""
        runs = [RowRun(s, 2 * i, 2 * i + 2) for i, s in enumerate(selections)]
        step = StepExtras.of(self.source, runs)
        assert step is not None
        return step


@pytest.fixture
def scene() -> Scene:
    torch.manual_seed(0)
    return Scene()


def of(*cids: str) -> Selection:
    return tuple((cid, 1.0) for cid in cids)


def test_steps_without_parts_have_none(scene: Scene) -> None:
    assert StepExtras.of(scene.source, [RowRun((), 0, 4)]) is None


def test_a_full_projection_replaces_its_columns_and_keeps_the_bias(scene: Scene) -> None:
    weight = torch.randn(16, HIDDEN)
    scene.add("full", {(1, "k_proj", ExtraKind.WEIGHT): weight})
    linear = Linear(HIDDEN, 64, bias=True, dtype=torch.float32)
    linear.weight.data.normal_()
    assert linear.bias is not None
    linear.bias.data.normal_()
    x = torch.randn(4, HIDDEN)
    y = linear(x)
    expected = y.clone()
    expected[2:, 32:48] = F.linear(x[2:], weight, linear.bias[32:48])
    step = scene.step((), of("full"))
    step.change_linear((0, "qkv"), linear, x, y[:0])
    assert step.changes_linear((1, "qkv")) and not step.changes_linear((0, "qkv"))
    step.change_linear((1, "qkv"), linear, x, y)
    torch.testing.assert_close(y, expected)


def test_gains_and_biases_of_a_sum_act_on_the_output_of_the_base(scene: Scene) -> None:
    gains, biases = torch.randn(2, 1, 64), torch.randn(2, 1, 64)
    for n, cid in enumerate("ab"):
        scene.add(
            cid, {(0, "qkv", ExtraKind.GAIN): gains[n], (0, "qkv", ExtraKind.BIAS): biases[n]}
        )
    y = torch.randn(6, 64)
    expected = y.clone()
    expected[:2] = y[:2] * (1 + gains[0]) + biases[0]
    expected[4:] = y[4:] * (1 + 0.5 * gains[0] - 2 * gains[1]) + 0.5 * biases[0] - 2 * biases[1]
    step = scene.step(of("a"), (), (("a", 0.5), ("b", -2.0)))
    step.change_norm(0, "qkv", y)
    torch.testing.assert_close(y, expected)


def test_rows_that_are_kept_are_renumbered(scene: Scene) -> None:
    gain = torch.randn(1, HIDDEN)
    scene.add("a", {(1, "mlp_norm", ExtraKind.GAIN): gain})
    normed = torch.randn(2, HIDDEN)
    expected = torch.stack([normed[0], normed[1] * (1 + gain[0])])
    step = scene.step((), of("a"))
    step.keep_rows([1, 3])
    step.change_norm(1, "mlp_norm", normed)
    torch.testing.assert_close(normed, expected)


def test_embeddings(scene: Scene) -> None:
    key = (MODEL_LEVEL, "embed_tokens")
    base, full = torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB + 7, HIDDEN)
    rows = torch.randn(3, HIDDEN)
    a, b = torch.randn(VOCAB, 4), torch.randn(4, HIDDEN)
    scene.add("full", {(*key, ExtraKind.WEIGHT): full})
    scene.add("rows", {(*key, ExtraKind.ROWS): rows}, (3, 8, 40))
    low_rank = {(*key, ExtraKind.LOW_RANK_A): a, (*key, ExtraKind.LOW_RANK_B): b}
    scene.add("low_rank", low_rank)
    step = scene.step(of("full"), (), of("rows"), (("low_rank", 0.5),))
    token_ids = torch.tensor([VOCAB + 6, 1, 2, 3, 40, 4, 5, 49])
    known = step.base_tokens(token_ids)
    assert known.max() < VOCAB
    embedded = 2.0 * base[known]
    step.change_embedding(embedded, token_ids, 2.0)
    expected = torch.stack(
        [
            *(full[VOCAB + 6], full[1], base[2], base[3], rows[2], base[4]),
            *(base[5] + 0.5 * a[5] @ b, base[49] + 0.5 * a[49] @ b),
        ]
    )
    torch.testing.assert_close(embedded, 2.0 * expected)


def test_logits_of_mixed_vocabularies(scene: Scene) -> None:
    key = (MODEL_LEVEL, "lm_head")
    base = torch.randn(VOCAB, HIDDEN)
    wide, narrow = torch.randn(VOCAB + 7, HIDDEN), torch.randn(VOCAB - 10, HIDDEN)
    rows, gain, bias = torch.randn(2, HIDDEN), torch.randn(VOCAB, 1), torch.randn(VOCAB, 1)
    a, b = torch.randn(4, HIDDEN), torch.randn(VOCAB, 4)
    scene.add("wide", {(*key, ExtraKind.WEIGHT): wide})
    scene.add("narrow", {(*key, ExtraKind.WEIGHT): narrow})
    scene.add("rows", {(*key, ExtraKind.ROWS): rows}, (7, 49))
    parts = {ExtraKind.LOW_RANK_A: a, ExtraKind.LOW_RANK_B: b}
    vectors = {ExtraKind.GAIN: gain, ExtraKind.BIAS: bias}
    scene.add("delta", {(*key, kind): values for kind, values in (parts | vectors).items()})
    selections = (of("wide"), (), of("narrow"), of("rows"), (("delta", 0.5),))
    hidden = torch.randn(5, HIDDEN)
    step = scene.step(*selections)

    # The second row of each selection, as if the first was not sampled.
    def head(some: Tensor) -> Tensor:
        return some @ base.T

    def cap(some: Tensor) -> Tensor:
        return some.div_(9).tanh_().mul_(9)

    logits = step.logits(hidden, [1, 3, 5, 7, 9], head, cap)

    expected = torch.full((5, VOCAB + 7), torch.nan)
    expected[1:, :VOCAB] = hidden[1:] @ base.T
    expected[0] = hidden[0] @ wide.T
    expected[2] = torch.nan
    expected[2, : VOCAB - 10] = hidden[2] @ narrow.T
    expected[3, [7, 49]] = hidden[3] @ rows.T
    own = expected[4, :VOCAB]
    low_rank = 0.5 * (hidden[4] @ a.T) @ b.T
    expected[4, :VOCAB] = own * (1 + 0.5 * gain[:, 0]) + 0.5 * bias[:, 0] + low_rank
    capped = torch.tanh(expected / 9) * 9
    torch.testing.assert_close(logits, capped.nan_to_num(nan=-torch.inf))
