"""Tells the server that the engine process lives."""

from __future__ import annotations

import threading
import time

from loramux.worker.channel import EngineChannel
from loramux.worker.messages import Heartbeat

_HEARTBEAT_S = 0.5


class HeartbeatThread:
    """Sends heartbeats with the age of the running step from a thread of its own."""

    def __init__(self, channel: EngineChannel) -> None:
        self._channel = channel
        self._step_began: float | None = None
        threading.Thread(target=self._send_heartbeats, daemon=True, name="heartbeat").start()

    def begin_step(self) -> None:
        self._step_began = time.monotonic()

    def end_step(self) -> None:
        self._step_began = None

    def _send_heartbeats(self) -> None:
        while True:
            began = self._step_began
            age = 0.0 if began is None else time.monotonic() - began
            try:
                self._channel.send(Heartbeat(step_age_s=age))
            except OSError:
                # The server is gone; the step loop gets an end of file on its own.
                return
            time.sleep(_HEARTBEAT_S)
