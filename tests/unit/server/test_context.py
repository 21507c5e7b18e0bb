"""What routes know of the server, also before the engine has told it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loramux.backend.host import Health
from loramux.errors import EngineStopped
from loramux.metrics.server import Metrics
from loramux.server.context import Context, ServerOptions
from tests.unit.server.scripted_backend import ScriptedBackend


def make_context(backend: ScriptedBackend, *names: str) -> Context:
    return Context(
        backend=backend,
        options=ServerOptions(served_model_names=names),
        metrics=Metrics(backend),
        names=backend.names,
    )


def test_base_has_its_own_name_unless_others_are_given() -> None:
    assert make_context(ScriptedBackend()).base_names == ("tiny-base",)
    assert make_context(ScriptedBackend(), "a", "b").base_names == ("a", "b")


@pytest.mark.parametrize("digest", ["sha256:0123456789abcdef", "0123456789abcdef"])
def test_fingerprint_is_the_start_of_the_digest(digest: str) -> None:
    backend = ScriptedBackend()
    backend.card = replace(backend.card, digest=digest)
    assert make_context(backend).fingerprint == "fp_0123456789ab"


@pytest.mark.parametrize("health", list(Health))
def test_readiness_follows_health(health: Health) -> None:
    backend = ScriptedBackend()
    backend.health = health
    context = make_context(backend)
    if health is Health.READY:
        context.require_ready()
        return
    with pytest.raises(EngineStopped):
        context.require_ready()
    if health is Health.STARTING:
        with pytest.raises(EngineStopped):
            context.require_known()
    else:
        context.require_known()
