from __future__ import annotations

import threading

from loramux.engine.start_phases import StartPhases


def test_phases_of_several_threads_are_reported_together_and_measured() -> None:
    now = [0.0]
    told: list[tuple[str, float]] = []
    phases = StartPhases(lambda *report: told.append(report), clock=lambda: now[0])

    def on_thread(what: str, share: float) -> None:
        thread = threading.Thread(target=phases, args=(what, share))
        thread.start()
        thread.join()

    phases("Compiling kernels", 0.0)
    now[0] = 1.0
    phases("Compiling kernels", 0.5)
    on_thread("Loading weights", 0.0)
    now[0] = 3.0
    phases("Compiling kernels", 1.0)
    phases("Capturing graphs", 0.2)
    now[0] = 4.0
    assert told == [
        ("Compiling kernels", 0.0),
        ("Compiling kernels", 0.5),
        ("Compiling kernels, Loading weights", 0.25),
        ("Compiling kernels, Loading weights", 0.5),
        ("Loading weights, Capturing graphs", 0.1),
    ]
    assert phases.seconds() == {
        "Compiling kernels": 3.0,
        "Loading weights": 3.0,
        "Capturing graphs": 1.0,
    }


def test_the_next_phase_of_a_thread_ends_the_one_before() -> None:
    now = [0.0]
    phases = StartPhases(clock=lambda: now[0])
    phases("Measuring memory", 0.0)
    now[0] = 2.0
    phases("Capturing graphs", 0.0)
    now[0] = 5.0
    assert phases.seconds() == {"Measuring memory": 2.0, "Capturing graphs": 3.0}
