from __future__ import annotations

from pathlib import Path

import pytest

from loramux.backend import Backend, Delta, failure_of
from loramux.config.engine import EngineConfig
from loramux.engine.async_engine import AsyncEngine, AsyncEngineOptions
from loramux.errors import AdapterRefused, DoesNotFit, LoramuxError, RequestTimeout
from loramux.types.request import FinishReason


def test_the_engine_offers_all_that_a_server_asks_for() -> None:
    engine = AsyncEngine(AsyncEngineOptions(model=Path("model"), config=EngineConfig()))
    asked = {name for name in vars(Backend) if not name.startswith("_")}
    assert asked <= set(dir(engine)), asked - set(dir(engine))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("timeout", RequestTimeout),
        ("adapter", AdapterRefused),
        ("memory", DoesNotFit),
        (None, LoramuxError),
        ("of a newer engine", LoramuxError),
    ],
)
def test_an_end_in_an_error_raises_by_its_code_with_its_own_words(
    code: str | None, kind: type[LoramuxError]
) -> None:
    end = Delta(
        index=0,
        text="",
        token_ids=(),
        logprobs=None,
        finish_reason=FinishReason.ERROR,
        error="Said why.",
        error_code=code,
    )
    error = failure_of(end)
    assert type(error) is kind and str(error) == "Said why."
    if isinstance(error, AdapterRefused):
        assert error.code == "adapter_unavailable"
