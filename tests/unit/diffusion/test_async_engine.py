"""The real engine process over a tiny model: images, refusals, signals, death and restart."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

from loramux.backend.host import Health
from loramux.backend.images import ImageBackend, ImageForm
from loramux.diffusion.async_engine import AsyncImageEngine
from loramux.diffusion.digest import pixel_digest, to_bytes
from loramux.diffusion.engine import ImageEngine
from loramux.diffusion.options import ImageEngineOptions
from loramux.diffusion.worker import open_engine
from loramux.errors import (
    AdapterNotFound,
    AdapterRefused,
    EngineStopped,
    InvalidRequest,
    UnsupportedModel,
)
from tests.image_factory import (
    ATTENTION,
    draw_all,
    make_adapter,
    make_pipeline,
    peft_tensors,
    request_for,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a model with files of two adapters."""
    folder = tmp_path_factory.mktemp("images")
    pipe = make_pipeline("flux")
    pipe.save_pretrained(folder / "flux")
    for rank, name in enumerate("ab", start=2):
        adapter = make_adapter(pipe, name, ATTENTION, rank=rank)
        save_file(peft_tensors(adapter), folder / f"{name}.safetensors")
    return folder


@pytest.fixture(scope="module")
def use(folder):
    """Run a coroutine function with a started engine that has both adapters."""
    options = ImageEngineOptions(
        model=folder / "flux", disk_folder=folder / "disk", disk_space_bytes=2**20
    )
    backend: ImageBackend = AsyncImageEngine(options)  # mypy checks the signatures
    engine = backend
    with asyncio.Runner() as runner:
        runner.run(engine.start())
        engine.cids = [
            runner.run(engine.add_adapter(str(folder / f"{name}.safetensors"))).cid for name in "ab"
        ]
        yield lambda work: runner.run(work(engine))
        runner.run(engine.close(drain_s=0))


def requests_of(cids):
    a, b = cids
    selections = [(), ((a, 1.0),), ((a, 0.5), (b, -1.0))]
    return [
        request_for("flux", f"r{index}", selection=selection, partial_images=1)
        for index, selection in enumerate(selections)
    ]


async def draw(engine, request):
    return [update async for update in engine.submit(request, ImageForm())]


async def wait_until_ready(engine):
    async with asyncio.timeout(120):
        while engine.health is not Health.READY:
            await asyncio.sleep(0.02)


def test_images_equal_those_of_the_engine_in_this_process(use, folder):
    async def work(engine):
        requests = requests_of(engine.cids)
        local = ImageEngine(make_pipeline("flux"))
        for name in "ab":
            local.register_adapter(folder / f"{name}.safetensors")
        expected = draw_all(local, requests)
        drawn = await asyncio.gather(*(draw(engine, request) for request in requests))
        for request, updates in zip(requests, drawn, strict=True):
            assert [update.step for update in updates[:-1]] == [1, 2, 3]
            assert [update.partial is not None for update in updates[:-1]] == [True, False, False]
            finished = updates[-1].finished
            pixels = to_bytes(expected[request.request_id])
            assert finished.digest == pixel_digest(pixels)
            with Image.open(io.BytesIO(finished.data)) as image:
                assert np.array_equal(np.asarray(image), pixels.numpy())
        found = [updates[-1].finished.tier_found for updates in drawn]
        assert found == [None, "host", "host"]
        uses = {one.cid: one for one in await engine.adapter_uses()}
        assert [uses[cid].tier for cid in engine.cids] == ["device", "device"]
        assert (await engine.probe(60)).keys() == {"generate_s", "adapter_s"}
        async with asyncio.timeout(20):
            while set(engine.stats.resident_adapters) != set(engine.cids):
                await asyncio.sleep(0.02)

    use(work)


def test_refusals_do_not_stop_the_engine(use, folder, tmp_path):
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"no tensors")

    async def work(engine):
        with pytest.raises(AdapterRefused):
            await engine.add_adapter(str(bad))
        good = str(folder / "a.safetensors")
        found = await engine.inspect_adapters([str(bad), good])
        assert isinstance(found[0], AdapterRefused) and found[1].cid == engine.cids[0]
        assert (await engine.examine_adapter(str(bad)))["ok"] is False
        report = await engine.examine_adapter(good)
        assert report["cid"] == engine.cids[0] and report["ranks"] == {"2": 7}
        with pytest.raises(InvalidRequest, match="multiple of"):
            await draw(engine, request_for("flux", "x", width=30))
        with pytest.raises(AdapterNotFound):
            await draw(engine, request_for("flux", "x", selection=(("gone", 1.0),)))
        # The server ends the process, after its images.
        os.kill(engine.engine_pid, signal.SIGTERM)
        await draw(engine, request_for("flux", "after"))
        assert engine.num_restarts == 0

    use(work)


@pytest.mark.slow
def test_a_killed_engine_is_replaced_and_learns_its_adapters(use):
    """kill -9 under load: open images end with an error, and the next ones are as before."""

    async def work(engine):
        a, b = engine.cids
        await engine.pin_adapter(b, True)
        request = requests_of(engine.cids)[2]
        before = (await draw(engine, request))[-1].finished
        fields = {"steps": 200, "width": 128, "height": 128, "selection": ((a, 1.0),)}
        long = [request_for("flux", f"long{i}", **fields) for i in range(4)]
        tasks = [asyncio.create_task(draw(engine, one)) for one in long]
        while engine.stats.num_running < len(long):
            await asyncio.sleep(0.01)
        view = engine.residency
        os.kill(engine.engine_pid, signal.SIGKILL)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, EngineStopped) for result in results), results
        with pytest.raises(EngineStopped):
            await draw(engine, request)
        await wait_until_ready(engine)
        assert engine.num_restarts == 1 and engine.residency is not view
        after = (await draw(engine, request))[-1].finished
        assert after.digest == before.digest
        async with asyncio.timeout(30):
            while [one.cid for one in await engine.adapter_uses() if one.is_pinned] != [b]:
                await asyncio.sleep(0.02)
        await engine.remove_adapter(a)
        with pytest.raises(AdapterNotFound):
            await draw(engine, request)

    use(work)


@pytest.mark.slow
def test_a_folder_without_a_model_is_refused(tmp_path: Path):
    with pytest.raises(UnsupportedModel, match="model_index"):
        open_engine(ImageEngineOptions(model=tmp_path))


@pytest.mark.slow
def test_a_folder_without_a_model_is_the_error_of_the_start(tmp_path: Path):
    engine = AsyncImageEngine(ImageEngineOptions(model=tmp_path))
    with pytest.raises(UnsupportedModel, match="model_index"):
        asyncio.run(engine.start())
