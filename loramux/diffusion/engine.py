"""The step loop: images with different adapters, samplers and progress share each forward."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor, nn

from loramux.backend.images import ImageAdapterCard
from loramux.diffusion.adapter import ImageAdapter
from loramux.diffusion.catalog import ReadAdapter
from loramux.diffusion.events import ImageEvent, ImageFacts
from loramux.diffusion.families.base import Family, Row, Text
from loramux.diffusion.families.find import family_of
from loramux.diffusion.forwards import ForwardCounts
from loramux.diffusion.job import Job, JobState
from loramux.diffusion.leases import AdapterLeases
from loramux.diffusion.lora_files.names import PipelineNames
from loramux.diffusion.memory import InlineExecutor, MemoryOptions, build_memory
from loramux.diffusion.planner import PlanLimits, Planner
from loramux.diffusion.prompts import PromptCache, PromptKey
from loramux.diffusion.rows import RowLora
from loramux.diffusion.samplers import SamplerFactory
from loramux.errors import AdapterNotFound, DoesNotFit, InvalidRequest, LoramuxError
from loramux.kernels.cpu.vector_math import detect_cpu
from loramux.memory.tiers import AdapterState
from loramux.types.composition import SumPart, check_alone
from loramux.types.image import ImageRequest
from loramux.types.request import BASE_SELECTION, Selection

if TYPE_CHECKING:
    from loramux.diffusion.forward_graphs import ForwardGraphs

PROMPT_CACHE_BYTES = 256 * 2**20
# Limits of what one step does beside the forward, so that other images wait for one step at most.
_MAX_DECODED = 4
_MAX_BEGUN = 2
_LOAD_WAIT_S = 0.05
_USUAL_GUIDANCE = 20.0
_log = logging.getLogger(__name__)


class ImageEngine:
    """Draws images; one thread calls its methods, and step() runs one forward of the denoiser."""

    def __init__(
        self,
        pipe: Any,
        limits: PlanLimits | None = None,
        *,
        memory: MemoryOptions | None = None,
        loads: Executor | None = None,
        prompt_cache_bytes: int = PROMPT_CACHE_BYTES,
    ) -> None:
        """Run loads of adapters on `loads`; None: steps wait for them."""
        detect_cpu()
        self.family: Family = family_of(pipe)
        self.samplers = SamplerFactory(pipe.scheduler)
        self.prompts = PromptCache(prompt_cache_bytes)
        nets = {name: getattr(pipe, name, None) for name in self.components}
        self._lora = {name: RowLora(net) for name, net in nets.items() if net is not None}
        self.memory = build_memory(
            memory or MemoryOptions(),
            PipelineNames(pipe, self.family.denoiser, self.family.text_encoders),
            self._lora,
            dtype=self.family.dtype,
            device=self.family.device,
            loads=loads or InlineExecutor(),
        )
        self._graphs = self._make_graphs(self.family.denoiser)
        self._leases = AdapterLeases(self.memory)
        self._limits = limits or PlanLimits()
        self._planner = Planner(self._limits)
        self._jobs: dict[str, Job] = {}
        self._facts: dict[str, ImageFacts] = {}
        self._removed: set[str] = set()
        # Images after their last step, in the order in which they are decoded.
        self._undecoded: list[Job] = []
        self.num_forwards = 0
        self.num_pauses = 0
        self.forwards = ForwardCounts()

    def warm_up(self) -> None:
        """Compiles kernels and draws the largest forward on a GPU, so that no image waits for it.

        The memory that it takes stays with this process: an engine that starts later on the same
        GPU counts it as used.
        """
        if self.family.device.type == "cpu":
            return
        for lora in self._lora.values():
            lora.warm_up()
        side = self.family.default_size
        one = ImageRequest(request_id="", prompt="-", width=side, height=side, steps=1, seed=0)
        for number in range(self._limits.num_images(self._num_tokens(one))):
            self.add(msgspec.structs.replace(one, request_id=f"warm-up {number}"))
        while self.has_work:
            for event in self.step():
                if event.error is not None:
                    raise event.error
        self.num_forwards, self.forwards = 0, ForwardCounts()

    def _make_graphs(self, component: str) -> ForwardGraphs | None:
        """Return the CUDA graphs of a component; None on a CPU, and for a family without them."""
        tables = self._lora[component].tables
        if tables is None or not self.family.has_graphs:
            return None
        # Imported here, as it needs Triton.
        from loramux.diffusion.forward_graphs import ForwardGraphs

        return ForwardGraphs(self.net, tables)

    @property
    def num_replays(self) -> int:
        """Returns the number of forwards that were replays of a CUDA graph."""
        return 0 if self._graphs is None else self._graphs.num_replays

    @property
    def components(self) -> tuple[str, ...]:
        """The components of the pipeline that adapters may change."""
        return (self.family.denoiser, *self.family.text_encoders)

    @property
    def net(self) -> nn.Module:
        return self.family.net

    @property
    def adapters(self) -> Mapping[str, ImageAdapterCard]:
        """The registered adapters by CID, wherever their weights are."""
        return {card.cid: card for card in self.memory.catalog.known()}

    @property
    def num_paused(self) -> int:
        """Images that have begun and did not take part in the last forward."""
        return sum(job.state is JobState.PAUSED for job in list(self._jobs.values()))

    @property
    def has_work(self) -> bool:
        return bool(self._jobs) or self.memory.residency.is_loading

    def state_of(self, request_id: str) -> JobState:
        return self._jobs[request_id].state

    def add_adapter(self, adapter: ImageAdapter) -> ImageAdapterCard:
        """Register an adapter that has no file."""
        found = self.memory.catalog.give(adapter)
        self.admit(found)
        return found.card

    def register_adapter(self, place: Path) -> ImageAdapterCard:
        """Read, check and register a file or folder; raise AdapterRefused or DoesNotFit."""
        found = self.memory.catalog.identify(place)
        self.admit(found)
        return found.card

    def admit(self, found: ReadAdapter) -> None:
        """Register an adapter that was read; its weights come to the device with an image."""
        self._removed.discard(found.card.cid)
        self.memory.admit(found)

    def adopt(self, card: ImageAdapterCard) -> None:
        """Register an adapter by its card alone; a load checks its file."""
        self._removed.discard(card.cid)
        self.memory.catalog.adopt(card)

    def remove_adapter(self, cid: str) -> None:
        """Refuses new requests with the adapter, and frees it once no image uses it."""
        self.memory.catalog.get(cid)
        self._removed.add(cid)
        self._free_removed()

    def add(self, request: ImageRequest) -> None:
        """Queues a request; raises InvalidRequest, AdapterNotFound or DoesNotFit."""
        request_id, family = request.request_id, self.family
        if request_id in self._jobs:
            raise LoramuxError(f"Request id {request_id!r} is in use.")
        for cid in request.cids:
            if cid in self._removed or cid not in self.memory.catalog:
                raise AdapterNotFound(f"No adapter {cid} is registered.")
        if len(set(request.cids)) < len(request.cids):
            raise InvalidRequest("An adapter is named twice.", param="adapters")
        alone = ((cid, self.memory.catalog.get(cid).only_alone) for cid in request.cids)
        check_alone((SumPart(cid, 1.0, why) for cid, why in alone), param="adapters")
        self.samplers.check(request.sampler)
        family.check(request)
        facts = ImageFacts(arrived_s=time.monotonic(), queue_depth=len(self._jobs))
        tier = self._leases.arrive(request)
        facts.tier_found = None if tier is None else str(tier)
        self._jobs[request_id] = Job(request)
        self._facts[request_id] = facts
        self._planner.add(request, family.batch_key(request), self._num_tokens(request))

    def _num_tokens(self, request: ImageRequest) -> int:
        """Image tokens of all rows of a request in one forward."""
        return self.family.num_tokens(request) * (2 if self.family.is_guided(request) else 1)

    def abort(self, request_id: str) -> None:
        """End an image before the next step, if it has not ended already."""
        job = self._jobs.get(request_id)
        if job is not None:
            self._end(job, JobState.ABORTED)

    @torch.no_grad()
    def step(self) -> list[ImageEvent]:
        """Run one forward for the images that the planner chooses, and decodes a finished group.

        Without an image that can run, it waits a moment for a load.
        """
        self.memory.move_adapters()
        self._free_removed()
        events: list[ImageEvent] = []
        for request_id, error in self._leases.failures():
            self._fail(self._jobs[request_id], error, events)
        jobs = [self._jobs[request_id] for request_id in self._planner.next_images(self._may_run())]
        for job in jobs:
            self._leases.begin(job.request.request_id)
        jobs = list(self._begun(jobs, events))
        if jobs:
            began = time.monotonic()
            self._run(jobs, events)
            self.memory.tier.costs.record_step(time.monotonic() - began, 0)
        for job in jobs:
            if job.is_finished and job.state is JobState.DENOISING:
                self._leave_planner(job)
                job.move(JobState.DECODING)
                self._undecoded.append(job)
        if self._undecoded:
            self._decode(self._next_undecoded(), events)
        elif not jobs and self.memory.residency.is_loading:
            self.memory.residency.poll(timeout_s=_LOAD_WAIT_S)
        return events

    def _may_run(self) -> Callable[[str], bool]:
        """Return what tells of each image, in the fair order, whether it takes part in the step.

        Where others have begun, few images begin in one step: their prompts are encoded in it.
        """
        has_adapters = self._leases.admission()
        is_busy = any(job.sampling is not None for job in self._jobs.values())
        num_begun = 0

        def may_run(request_id: str) -> bool:
            nonlocal num_begun
            job = self._jobs[request_id]
            if job.sampling is not None:
                return True
            can_begin = has_adapters(request_id)
            lacks = not can_begin and self._leases.lacks_adapters(request_id)
            job.move(JobState.LOADING if lacks else JobState.QUEUED)
            if not can_begin or (is_busy and num_begun >= _MAX_BEGUN):
                return False
            num_begun += 1
            return True

        return may_run

    @torch.no_grad()
    def effects(self, request: ImageRequest) -> list[float]:
        """Return how much the selection of a request changes each prediction of the base.

        The predictions are those along the base's own steps; 0.1 is a change by a tenth of their
        norm.
        """
        residency = self.memory.residency
        if not residency.load_now(request.cids):
            raise DoesNotFit("The memory for adapters has no room for these at once.")
        try:
            return self._effects(request)
        finally:
            residency.release(request.cids)

    def _effects(self, request: ImageRequest) -> list[float]:
        family = self.family
        plain = Job(msgspec.structs.replace(request, selection=BASE_SELECTION))
        changed = Job(request)
        for job in (plain, changed):
            self._begin(job)
        found = []
        sampling, text = plain.sampling, changed.positive
        assert sampling is not None and text is not None
        while not plain.is_finished:
            rows = [plain.rows()[-1], Row(sampling, text)]
            selections = [BASE_SELECTION, request.selection]
            self._lora[family.denoiser].set_rows(selections, family.token_ranges(rows))
            base, other = family.forward(rows)
            found.append(float((other - base).norm() / base.norm()))
            sampling.advance(base)
        return found

    def running_adapters(self) -> Mapping[str, int]:
        """Return the number of images that have begun with each adapter."""
        return self._leases.running_counts()

    def waiting_adapters(self) -> Mapping[str, int]:
        """Return the number of images that wait for each adapter."""
        return self._leases.waiting_counts()

    @property
    def num_running(self) -> int:
        """Returns the number of images that have begun."""
        return sum(job.sampling is not None for job in self._jobs.values())

    @property
    def num_waiting(self) -> int:
        return len(self._jobs) - self.num_running

    def waiting_tenants(self) -> Mapping[str, int]:
        """Return the number of waiting images of each tenant."""
        return Counter(job.request.tenant for job in self._jobs.values() if job.sampling is None)

    def close(self) -> None:
        self.memory.close()

    def check_integrity(self) -> None:
        self._planner.check_integrity()
        self._leases.check_integrity()
        assert len(self._jobs) == len(self._facts)
        assert len(self._planner) + len(self._undecoded) == len(self._jobs)
        for request_id, job in self._jobs.items():
            job.check_integrity()
            known = self.memory.catalog
            assert all(cid in known for cid in job.request.cids), "an adapter in use was freed"
            assert (job in self._undecoded) == (job.state is JobState.DECODING)
            assert self._leases.is_waiting(request_id) <= (job.sampling is None)

    def _begun(self, jobs: Sequence[Job], events: list[ImageEvent]) -> Iterator[Job]:
        """Encode the prompts of new jobs; yield the jobs that can take a step."""
        for job in jobs:
            if job.state is JobState.QUEUED:
                facts = self._facts[job.request.request_id]
                try:
                    self._begin(job)
                except Exception as error:
                    self._fail(job, error, events)
                    continue
                facts.queue_s = time.monotonic() - facts.arrived_s
                if facts.tier_found not in (None, AdapterState.DEVICE):
                    facts.load_s = self.memory.residency.load_s(job.request.cids)
                self._count_tokens(job, facts)
            yield job

    def _begin(self, job: Job) -> None:
        request, family = job.request, self.family
        job.positive = self._encode(request, request.prompt, is_negative=False)
        if family.is_guided(request):
            job.negative = self._encode(request, request.negative_prompt, is_negative=True)
        generator = torch.Generator().manual_seed(request.seed)
        job.sampling = family.start(request, self.samplers.make(request.sampler), generator)
        job.move(JobState.READY)

    def _count_tokens(self, job: Job, facts: ImageFacts) -> None:
        assert job.sampling is not None
        facts.num_steps = job.sampling.num_steps
        num_rows = 1 if job.negative is None else 2
        facts.image_tokens = self.family.num_tokens(job.request) * num_rows * facts.num_steps
        facts.prompt_tokens = len(self.family.pipe.tokenizer(job.request.prompt).input_ids)
        facts.warnings = self.family.warnings(job.request)

    def _encode(self, request: ImageRequest, text: str, *, is_negative: bool) -> Text:
        family, length = self.family, self.family.length(request)
        selection = self._text_part(request.selection)

        def encode() -> Text:
            for name in family.text_encoders:
                if name in self._lora:
                    self._lora[name].set_all(selection)
            if request.weighs_words:
                return family.encode_weighed(text, length, is_negative=is_negative)
            return (family.encode_negative if is_negative else family.encode)(text, length)

        key = PromptKey(text, is_negative, request.weighs_words, length, selection)
        return self.prompts.get(key, encode)

    def _text_part(self, selection: Selection) -> Selection:
        encoders = set(self.family.text_encoders)
        return tuple(
            (cid, weight)
            for cid, weight in selection
            if not encoders.isdisjoint(self.memory.catalog.get(cid).num_modules)
        )

    def _run(self, jobs: Sequence[Job], events: list[ImageEvent]) -> None:
        """Take one step of all jobs; if their forward fails, one of each, to find the cause."""
        # Rows with equal selections become neighbours, which share the GEMMs of their adapters.
        jobs = sorted(jobs, key=lambda job: job.request.selection)
        try:
            predictions = self._predict(jobs)
        except Exception as error:
            if len(jobs) == 1:
                self._fail(jobs[0], error, events)
                return
            _log.warning("a forward of %d images failed: %r", len(jobs), error)
            for job in jobs:
                self._run([job], events)
            return
        self._count(jobs)
        for job, prediction in zip(jobs, predictions, strict=True):
            try:
                self._advance(job, prediction, events)
            except Exception as error:
                self._fail(job, error, events)

    def _predict(self, jobs: Sequence[Job]) -> list[Tensor]:
        family = self.family
        rows = [row for job in jobs for row in job.rows()]
        selections = [row.sampling.request.selection for row in rows]
        self._lora[family.denoiser].set_rows(selections, family.token_ranges(rows))
        with contextlib.nullcontext() if self._graphs is None else self._graphs.replaying():
            predictions = iter(family.forward(rows))
        self.num_forwards += 1
        self.forwards.add(selections)
        guided = []
        for job in jobs:
            prediction = next(predictions)
            if job.negative is not None:
                prediction = family.guide(job.request, next(predictions), prediction)
            guided.append(prediction)
        return guided

    def _advance(self, job: Job, prediction: Tensor, events: list[ImageEvent]) -> None:
        sampling, request_id = job.sampling, job.request.request_id
        assert sampling is not None
        latents = self.family.predicted(sampling, prediction) if self._is_due(job) else None
        sampling.advance(prediction)
        job.move(JobState.DENOISING)
        size = _size(job)
        events.append(
            ImageEvent(
                request_id=request_id,
                step=sampling.position,
                num_steps=sampling.num_steps,
                preview=None if latents is None else self.family.images(latents, size)[0],
            )
        )

    def _is_due(self, job: Job) -> bool:
        """Whether the next step of a job ends with a preview."""
        assert job.sampling is not None
        done = job.sampling.position + 1
        return job.request.has_preview_after(done, job.sampling.num_steps)

    def _count(self, jobs: Sequence[Job]) -> None:
        """Note which images shared this forward, and which ones had to pause."""
        num_adapters = len({cid for job in jobs for cid in job.request.cids})
        for job in jobs:
            facts = self._facts[job.request.request_id]
            facts.max_images = max(facts.max_images, len(jobs))
            facts.max_adapters = max(facts.max_adapters, num_adapters)
        chosen = set(jobs)
        for job in self._jobs.values():
            if job.state is JobState.DENOISING and job not in chosen:
                job.move(JobState.PAUSED)
                self._facts[job.request.request_id].num_pauses += 1
                self.num_pauses += 1

    def _next_undecoded(self) -> list[Job]:
        """Take the images that are decoded next, which have one size."""
        size = _size(self._undecoded[0])
        group = [job for job in self._undecoded if _size(job) == size][:_MAX_DECODED]
        self._undecoded = [job for job in self._undecoded if job not in group]
        return group

    def _decode(self, jobs: list[Job], events: list[ImageEvent]) -> None:
        began = time.monotonic()
        latents = [job.sampling.latents for job in jobs if job.sampling is not None]
        try:
            images = self.family.images(torch.cat(latents), _size(jobs[0]))
        except Exception as error:
            if len(jobs) == 1:
                self._fail(jobs[0], error, events)
                return
            for job in jobs:
                self._decode([job], events)
            return
        now = time.monotonic()
        for job, pixels in zip(jobs, images, strict=True):
            if not bool(torch.isfinite(pixels).all()):
                self._fail(job, _not_finite(job.request), events)
                continue
            facts = self._facts[job.request.request_id]
            facts.decode_s = now - began
            facts.denoise_s = began - facts.arrived_s - facts.queue_s
            self._end(job, JobState.DONE)
            events.append(ImageEvent(request_id=job.request.request_id, pixels=pixels, facts=facts))

    def _fail(self, job: Job, error: Exception, events: list[ImageEvent]) -> None:
        if not isinstance(error, LoramuxError):
            _log.error("image %s failed", job.request.request_id, exc_info=error)
            error = LoramuxError(f"The image could not be drawn: {error!r}.")
        self._end(job, JobState.FAILED)
        events.append(ImageEvent(request_id=job.request.request_id, error=error))

    def _end(self, job: Job, state: JobState) -> None:
        request_id = job.request.request_id
        if job.state is not JobState.DECODING:
            self._leave_planner(job)
        elif job in self._undecoded:
            self._undecoded.remove(job)
        job.move(state)
        del self._jobs[request_id]
        del self._facts[request_id]
        self._free_removed()

    def _leave_planner(self, job: Job) -> None:
        """Frees what an image holds for its steps."""
        self._planner.remove(job.request.request_id)
        self._leases.leave(job.request.request_id)

    def _free_removed(self) -> None:
        for cid in [cid for cid in self._removed if self.memory.forget(cid)]:
            self._removed.discard(cid)
            self.prompts.forget(cid)


def _not_finite(request: ImageRequest) -> LoramuxError:
    """Return the error of an image with NaN pixels; it is the client's if its values may be the
    cause.
    """
    causes = [
        f"{name} ({value:g})"
        for name in ("guidance_scale", "true_cfg_scale")
        if (value := getattr(request, name) or 0.0) > _USUAL_GUIDANCE
    ]
    if request.selection:
        weights = ", ".join(f"{weight:g}" for _, weight in request.selection)
        causes.append(f"the weights of the adapters ({weights})")
    text = "The image has NaN pixels"
    if not causes:
        return LoramuxError(f"{text}.")
    param = "adapter_weights" if request.selection else "guidance_scale"
    return InvalidRequest(f"{text}: decrease {' or '.join(causes)}.", param=param)


def _size(job: Job) -> tuple[int, int]:
    return job.request.height, job.request.width
