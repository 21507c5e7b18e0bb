"""Kernels of extras, and their reference, against sums of matrix products.

The interpreter's matrix product is wrong for bfloat16; tests/gpu/extras_check.py has all dtypes.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

from loramux.adapters.packed.extras import EMBEDDING, HEAD, MODEL_LEVEL
from loramux.kernels.gpu.extras import ops  # noqa: E402
from loramux.kernels.gpu.extras.tables import (
    ATTENTION_NORM,
    MLP_NORM,
    LayerNumbers,
    ReplacedOutputs,
)
from loramux.kernels.reference import extras as reference
from loramux.types.request import Selection
from tests.extras_factory import (  # noqa: E402
    BIAS,
    GAIN,
    HIDDEN,
    LOW_RANK_A,
    LOW_RANK_B,
    NUM_LAYERS,
    SITES,
    VOCAB,
    WEIGHT,
    ExtrasWorld,
    one,
)

NUMBERS = LayerNumbers(SITES)
LIMITS = {torch.float32: 1e-4, torch.float16: 1e-2}
SUM: Selection = (("bias", -2.0), ("vectors", 0.5))
RANKS: Selection = (("more ranks", 0.5), ("ranks", 2.0))
MIXED: list[Selection] = [one("vectors"), (), SUM, one("weights"), one("weights"), one("rows")]


@pytest.fixture(params=[reference, ops], ids=["reference", "triton"])
def kernels(request: pytest.FixtureRequest) -> ModuleType:
    module: ModuleType = request.param
    return module


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_gains_and_biases_of_sums(kernels: ModuleType, dtype: torch.dtype) -> None:
    world = ExtrasWorld(dtype)
    y = torch.randn(len(MIXED) + 1, 112).to(dtype)
    expected = y.double()
    gain, bias = (world.values["vectors"][1, "qkv", kind][0].double() for kind in (GAIN, BIAS))
    expected[0] = expected[0] * (1 + gain) + bias
    other = world.values["bias"][1, "qkv", BIAS][0].double()
    expected[2] = expected[2] * (1 + 0.5 * gain) + 0.5 * bias - 2 * other
    kernels.scale_add(world.tables(MIXED), y, NUMBERS.vector(1, NUMBERS.vector_of["qkv"]))
    limit = LIMITS[dtype]
    torch.testing.assert_close(y.double(), expected, atol=limit, rtol=limit)


def test_norms_have_their_own_gains(kernels: ModuleType) -> None:
    world = ExtrasWorld()
    tables = world.tables([one("vectors")])
    places = {
        (1, "mlp_norm", GAIN): NUMBERS.vector(1, MLP_NORM),
        (MODEL_LEVEL, "final_norm", GAIN): NUMBERS.vector(NUM_LAYERS, 0),
    }
    for key, vector in places.items():
        y = torch.ones(1, HIDDEN)
        kernels.scale_add(tables, y, vector)
        torch.testing.assert_close(y, 1 + world.values["vectors"][key])
    y = torch.ones(1, HIDDEN)
    kernels.scale_add(tables, y, NUMBERS.vector(1, ATTENTION_NORM))
    assert (y == 1).all()


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_weights_replace_projections(
    kernels: ModuleType, has_bias: bool, dtype: torch.dtype
) -> None:
    """Two of three projections, for a run of rows that is longer than a tile."""
    world = ExtrasWorld(dtype)
    selections = [*MIXED, *[one("weights")] * 17]
    x, y = torch.randn(23, HIDDEN).to(dtype), torch.randn(23, 112).to(dtype)
    # Rows of a graph that the step does not use.
    x[1] = float("nan")
    bias = torch.randn(112).to(dtype) if has_bias else None
    expected = y.double()
    own = [row for row, selection in enumerate(selections) if selection == one("weights")]
    for name, start, stop in (("q_proj", 0, 80), ("v_proj", 96, 112)):
        weight = world.values["weights"][1, name, WEIGHT].double()
        value = x[own].double() @ weight.t()
        expected[own, start:stop] = value if bias is None else value + bias[start:stop].double()
    linear = ReplacedOutputs(NUMBERS.matrix(1, "q_proj"), SITES[0].out_features, bias)
    kernels.replace_outputs(world.tables(selections), y, x, linear)
    limit = LIMITS[dtype]
    torch.testing.assert_close(y.double(), expected, atol=limit, rtol=limit)


@pytest.mark.parametrize("token_dtype", [torch.int32, torch.int64], ids=str)
def test_embeddings_are_replaced_by_token(kernels: ModuleType, token_dtype: torch.dtype) -> None:
    world, scale = ExtrasWorld(), 3.0
    rows = [(one("weights"), VOCAB + 6), (one("rows"), 90), (one("rows"), 91), ((), 3)]
    rows += [(one("rows"), VOCAB + 2), (RANKS, 77), (one("vectors"), 3)]
    tokens = torch.tensor([token for _, token in rows], dtype=token_dtype)
    residual = torch.randn(len(rows), HIDDEN)
    expected = residual.clone()
    values = world.values
    key = (MODEL_LEVEL, EMBEDDING, WEIGHT)
    expected[0] = scale * values["weights"][key][VOCAB + 6]
    replaced = next(iter(values["rows"].values()))
    expected[1], expected[4] = scale * replaced[2], scale * replaced[3]
    for name, weight in RANKS:
        a = values[name][MODEL_LEVEL, EMBEDDING, LOW_RANK_A]
        b = values[name][MODEL_LEVEL, EMBEDDING, LOW_RANK_B]
        expected[5] += scale * weight * (a[77] @ b)
    kernels.embed_rows(world.tables([s for s, _ in rows]), residual, tokens, scale)
    torch.testing.assert_close(residual, expected)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("num_columns", [VOCAB, VOCAB + 7])
def test_heads_of_every_kind(kernels: ModuleType, num_columns: int, dtype: torch.dtype) -> None:
    world, values = ExtrasWorld(dtype), {}
    for name, parts in world.values.items():
        values[name] = {key[1:]: value.double() for key, value in parts.items()}
    selections = [one("weights"), one("weights"), one("short head"), one("rows"), RANKS, SUM, ()]
    hidden = torch.randn(len(selections), HIDDEN).to(dtype)
    logits = torch.full((len(selections), num_columns), float("-inf"), dtype=dtype)
    logits[:, :VOCAB] = torch.randn(len(selections), VOCAB).to(dtype)
    expected, x = logits.double(), hidden.double()
    expected[:2] = (x[:2] @ values["weights"][HEAD, WEIGHT].t())[:, :num_columns]
    expected[2] = float("-inf")
    expected[2, : VOCAB - 40] = values["short head"][HEAD, WEIGHT] @ x[2]
    expected[3, [0, 7, 149]] = list(values["rows"].values())[1] @ x[3]
    for row, selection in ((4, RANKS), (5, SUM)):
        parts = [(weight, values[name]) for name, weight in selection]
        vectors = [(w, p) for w, p in parts if (HEAD, GAIN) in p]
        gain, bias = (sum(w * p[HEAD, kind][:, 0] for w, p in vectors) for kind in (GAIN, BIAS))
        expected[row, :VOCAB] = expected[row, :VOCAB] * (1 + gain) + bias
        for weight, part in parts:
            if (HEAD, LOW_RANK_A) in part:
                change = part[HEAD, LOW_RANK_B] @ (part[HEAD, LOW_RANK_A] @ x[row])
                expected[row, :VOCAB] += weight * change
    tables = world.tables(selections)
    kernels.replace_logits(tables, logits, hidden)
    kernels.scale_logits(tables, logits)
    kernels.add_low_rank_logits(tables, logits, hidden)
    limit = LIMITS[dtype]
    torch.testing.assert_close(logits.double(), expected, atol=limit, rtol=limit)
