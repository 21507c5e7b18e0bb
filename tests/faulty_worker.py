"""An engine process with a fault, named by $FAULT; run as a script in place of the engine."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

from loramux.engine import worker
from loramux.engine.engine import Engine
from loramux.worker.step_loop import run_process


def hang_in_a_step(engine: Engine) -> Any:
    time.sleep(3600)


def sleep_with_the_lock(engine: Engine) -> Any:
    """Sleeps as native code does that never gives the interpreter lock back."""
    ctypes.PyDLL(None).sleep(3600)


def die_in_the_first_start(mark: Path) -> None:
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def end_in_the_start(number: signal.Signals) -> None:
    """Lets the process signal itself when the engine is built."""

    def build(*args: Any, **kwargs: Any) -> Engine:
        kwargs["progress"]("Preparing CPU kernels", 0.0)
        os.kill(os.getpid(), number)
        return build_engine(*args, **kwargs)

    worker.build_engine = build  # type: ignore[attr-defined]


build_engine = worker.build_engine  # type: ignore[attr-defined]
STEPS = {"hang": hang_in_a_step, "deadlock": sleep_with_the_lock}
SIGNALS = {"die": signal.SIGKILL, "stop": signal.SIGSTOP}

if __name__ == "__main__":
    fault = os.environ["FAULT"]
    if fault in STEPS:
        Engine.step = STEPS[fault]  # type: ignore[method-assign]
    elif fault in SIGNALS:
        end_in_the_start(SIGNALS[fault])
    else:
        die_in_the_first_start(Path(fault))
    run_process(worker.serve)
