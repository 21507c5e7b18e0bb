"""Tables of extras, and the modes and lists of steps that use them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loramux.errors import DoesNotFit
from loramux.kernels.gpu.extras.tables import (
    TILE_CHAIN,
    TILE_NUM_ROWS,
    TILE_SLOT,
    TILE_START,
    TILE_WORDS,
)
from loramux.kernels.gpu.lora.work_list import WorkListFull
from loramux.kernels.reference import lora_segmented
from loramux.lora.device_extras import ExtrasUse
from loramux.lora.extras_step import graph_limits
from loramux.lora.graph_lora import BASE_MODE, GraphLora, LoraMode, LoraPath
from loramux.lora.segmented import DeviceDirectory, LoraDevice, decode_work
from loramux.types.request import Selection
from tests.extras_factory import (
    HEAD,
    HIDDEN,
    LOW_RANK_A,
    LOW_RANK_B,
    MODEL_LEVEL,
    NUM_LAYERS,
    SITES,
    VOCAB,
    ExtrasWorld,
    one,
    spec,
)

PLAIN: Selection = (("plain", 1.0),)
SUM: Selection = (("more ranks", 0.5), ("ranks", 2.0))


def test_a_removed_adapter_frees_its_slot_and_its_part_of_the_heap() -> None:
    world = ExtrasWorld()
    full = world.directory
    assert "vectors" in full and "plain" not in full
    for _ in range(5):
        for name in ("weights", "vectors"):
            full.remove(name)
            assert not full.uses([one(name)])
        for name in ("vectors", "weights"):
            full.add(world.residents[name])
    y = torch.zeros(1, 112)
    step = world.step([one("vectors")])
    vector = step.numbers.vector(1, step.numbers.vector_of["qkv"])
    step.kernels.scale_add(step.tables, y, vector)
    assert torch.equal(y[0], world.values["vectors"][1, "qkv", "bias"][0])
    full.remove("never there")


def test_tables_without_room_refuse_an_adapter_and_keep_the_others() -> None:
    world = ExtrasWorld()
    directory = DeviceDirectory(
        SITES,
        num_layers=NUM_LAYERS,
        max_adapters=9,
        max_blocks=8,
        device=torch.device("cpu"),
        extras=world.directory,
    )
    spare = world.residents["bias"]
    for cid in ("x", "y"):
        spare = type(spare)(cid, spare.layout, spare.page_ids)
        if cid == "x":
            directory.add(spare)
    with pytest.raises(DoesNotFit, match="the device holds 8"):
        directory.add(spare)
    assert "y" not in directory and "x" in directory
    directory.remove("x")
    directory.add(spare)
    assert world.directory.uses([one("y")]) == ExtrasUse.LINEARS


def test_a_head_of_a_rank_that_kernels_cannot_take_is_refused() -> None:
    head = [
        spec(MODEL_LEVEL, HEAD, LOW_RANK_A, 513, HIDDEN),
        spec(MODEL_LEVEL, HEAD, LOW_RANK_B, VOCAB, 513),
    ]
    with pytest.raises(DoesNotFit, match="rank 513"):
        ExtrasWorld(specs={"large": head})


def test_modes_name_the_parts_of_a_step_and_wide_heads_have_no_graph() -> None:
    world = ExtrasWorld()
    directory = DeviceDirectory(
        SITES,
        num_layers=NUM_LAYERS,
        max_adapters=9,
        max_blocks=8,
        device=torch.device("cpu"),
        extras=world.directory,
    )
    for name, resident in world.residents.items():
        world.directory.remove(name)
        directory.add(resident)
    device = LoraDevice(
        kernels=lora_segmented,
        directory=directory,
        num_layers=NUM_LAYERS,
        pool=world.pool,
        num_sms=1,
    )
    lora = GraphLora(decode_work(device, 4, use_pdl=False), None)
    words = np.zeros(lora.num_words, dtype=np.int32)

    def mode_of(*selections: Selection) -> LoraMode | None:
        return lora.fill(selections, [1] * len(selections), 4, words)

    everything = ExtrasUse.LINEARS | ExtrasUse.NORMS | ExtrasUse.HEAD
    assert mode_of(one("bias"), ()) == LoraMode(LoraPath.SEGMENTED, extras=ExtrasUse.LINEARS)
    assert mode_of(one("bias"), one("vectors")) == LoraMode(LoraPath.SEGMENTED, extras=everything)
    assert mode_of(one("rows")) == LoraMode(
        LoraPath.SEGMENTED, extras=ExtrasUse.EMBEDDING | ExtrasUse.HEAD
    )
    assert mode_of((), one("weights")) is None
    assert world.directory.num_columns([(), one("weights")]) == VOCAB + 7
    assert world.directory.num_columns([one("short head")]) == VOCAB
    assert mode_of(()) == BASE_MODE
    assert not any(mode.extras for mode in lora.modes(4)), "captured when they are needed"


def test_tiles_cover_the_rows_of_each_adapter_and_chain_those_of_sums() -> None:
    world = ExtrasWorld()
    work = world.work()
    limits = graph_limits(64, 4, 16)
    words = np.full(limits.num_words, -1, dtype=np.int32)
    selections = [one("weights"), one("weights"), PLAIN, SUM]
    used = work.fill(selections, [10, 10, 5, 3], limits, words)
    tiles = words[limits.tiles_at : used].reshape(-1, TILE_WORDS)
    slots = {name: world.directory.entries(one(name))[0].slot for name in world.specs}
    assert tiles[:, [TILE_START, TILE_NUM_ROWS, TILE_CHAIN]].tolist() == [
        [0, 16, 1],
        [16, 4, 1],
        [25, 3, 2],
        [25, 3, 0],
    ]
    assert tiles[2:, TILE_SLOT].tolist() == [slots["more ranks"], slots["ranks"]]
    with pytest.raises(WorkListFull):
        work.fill([SUM, one("ranks")] * 8, [1] * 16, limits, words)
    with pytest.raises(WorkListFull):
        work.fill([SUM, one("ranks")] * 2, [16] * 4, graph_limits(16, 4, 16), words)


def test_steps_without_graphs_have_lists_of_their_own_size() -> None:
    work = ExtrasWorld().work()
    assert work.step_now([PLAIN, ()], [3, 1]) is None
    step = work.step_now([SUM, one("ranks"), SUM], [70, 1, 200])
    assert step is not None and step.uses == ExtrasUse.EMBEDDING | ExtrasUse.HEAD
    assert int(step.tables.words[0]) == 2 * 2 + 1 + 2 * 4
