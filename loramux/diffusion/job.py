"""The states of one image between its arrival and its pixels."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from loramux.diffusion.families.base import Row, Sampling, Text
from loramux.types.image import ImageRequest


class JobState(StrEnum):
    QUEUED = "queued"
    LOADING = "loading"
    """Adapters of the image are on their way to the device."""
    READY = "ready"
    """The prompt is encoded, the noise drawn."""
    DENOISING = "denoising"
    """The image took part in the last forward."""
    PAUSED = "paused"
    """Other images took its place after some of its steps; its latents are kept."""
    DECODING = "decoding"
    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"


_ENDS = (JobState.FAILED, JobState.ABORTED)
_NEXT: dict[JobState, tuple[JobState, ...]] = {
    JobState.QUEUED: (JobState.LOADING, JobState.READY, *_ENDS),
    JobState.LOADING: (JobState.QUEUED, *_ENDS),
    JobState.READY: (JobState.DENOISING, *_ENDS),
    JobState.DENOISING: (JobState.PAUSED, JobState.DECODING, *_ENDS),
    JobState.PAUSED: (JobState.DENOISING, *_ENDS),
    JobState.DECODING: (JobState.DONE, *_ENDS),
    JobState.DONE: (),
    JobState.FAILED: (),
    JobState.ABORTED: (),
}


@dataclass(slots=True, eq=False)
class Job:
    """One request with the state that its next step needs."""

    request: ImageRequest
    state: JobState = JobState.QUEUED
    sampling: Sampling | None = None
    positive: Text | None = None
    negative: Text | None = None
    """Set if the image has classifier-free guidance."""

    def move(self, state: JobState) -> None:
        if state is not self.state:
            assert state in _NEXT[self.state], f"{self.state} -> {state}"
            self.state = state

    @property
    def is_finished(self) -> bool:
        return self.sampling is not None and self.sampling.position == self.sampling.num_steps

    def rows(self) -> list[Row]:
        """Return the rows of the next step, first the negative one."""
        assert self.sampling is not None and self.positive is not None
        texts = [self.positive] if self.negative is None else [self.negative, self.positive]
        return [Row(self.sampling, text) for text in texts]

    def check_integrity(self) -> None:
        is_started = self.state not in (JobState.QUEUED, JobState.LOADING, *_ENDS)
        if is_started:
            assert self.sampling is not None and self.positive is not None
            assert 0 <= self.sampling.position <= self.sampling.num_steps
        if self.state in (JobState.DENOISING, JobState.PAUSED):
            assert self.sampling is not None and self.sampling.position > 0
