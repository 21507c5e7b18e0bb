"""The conduct of a replica as its router sees it: faults in a row, and first bytes it measured.

Pure: the time is given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FAULTS_IN_A_ROW = 5
EJECT_S, MAX_EJECT_S = 2.0, 60.0
MAX_EJECTED_SHARE = 0.5
"""At most this share of a fleet is ejected at once."""
# An ejection this long ago makes the next one no longer.
_FORGET_EJECTION_S = 300.0
# Time constant of the averages.
_FADE_S = 10.0
_MIN_SAMPLES = 3
# First bytes may take this multiple of what the replica claims, and this much longer.
_TOLERANCE, _SLACK_S = 3.0, 0.05


@dataclass(slots=True)
class Conduct:
    num_faults: int = 0
    """In a row."""
    num_ejections: int = 0
    ejected_until: float = 0.0
    """0: not ejected. Later than that time it is half open: one request at a time probes it."""
    is_probed: bool = False
    num_samples: int = 0
    measured_s: float = 0.0
    """Smoothed seconds to the first byte, as this router measured them."""
    claimed_s: float = 0.0
    """Smoothed seconds that the reports promised for the same requests."""
    sampled_at: float = 0.0

    def is_out(self, now: float) -> bool:
        return now < self.ejected_until or (self.ejected_until > 0 and self.is_probed)

    def begun(self, now: float) -> None:
        if self.ejected_until and now >= self.ejected_until:
            self.is_probed = True

    def good(self, now: float) -> None:
        if now >= self.ejected_until:
            self.num_faults, self.ejected_until, self.is_probed = 0, 0.0, False

    def fault(self, now: float, *, may_eject: bool) -> None:
        """Count a fault of the replica; eject it after several, each time for longer."""
        self.num_faults += 1
        is_half_open = 0 < self.ejected_until <= now
        is_due = self.num_faults >= FAULTS_IN_A_ROW and not self.ejected_until
        if is_half_open or (is_due and may_eject):
            if now - self.ejected_until > _FORGET_EJECTION_S:
                self.num_ejections = 0
            seconds = min(MAX_EJECT_S, EJECT_S * 2.0 ** min(self.num_ejections, 16))
            self.num_ejections += 1
            self.ejected_until, self.is_probed = now + seconds, False

    def sample(self, measured_s: float, *, claimed_s: float, now: float) -> None:
        """Add the time to a first byte, and what the reports had promised for it."""
        kept = math.exp(-max(0.0, now - self.sampled_at) / _FADE_S) if self.num_samples else 0.0
        # Many samples in a moment count as a few: each has a part of its own.
        kept = min(kept, 0.8)
        self.measured_s = kept * self.measured_s + (1 - kept) * measured_s
        self.claimed_s = kept * self.claimed_s + (1 - kept) * claimed_s
        self.num_samples, self.sampled_at = self.num_samples + 1, now

    def excess_s(self, now: float) -> float:
        """Return by how much the replica is slower than it claims; fades without new samples."""
        if self.num_samples < _MIN_SAMPLES:
            return 0.0
        measured = self.measured_s * math.exp(-max(0.0, now - self.sampled_at) / _FADE_S)
        return max(0.0, measured - _TOLERANCE * self.claimed_s - _SLACK_S)
