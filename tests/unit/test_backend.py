from __future__ import annotations

from pathlib import Path

import pytest

from loramux.backend.text import Delta, TextBackend, failure_of
from loramux.config.engine import EngineConfig
from loramux.engine.async_engine import AsyncEngine, AsyncEngineOptions
from loramux.errors import AdapterRefused, DoesNotFit, LoramuxError, RequestTimeout
from loramux.types.request import FinishReason


def test_the_async_engine_implements_the_text_backend() -> None:
    engine = AsyncEngine(AsyncEngineOptions(model=Path("model"), config=EngineConfig()))
    backend: TextBackend = engine  # mypy checks the signatures
    asked = {name for name in dir(TextBackend) if not name.startswith("_")}
    assert asked <= set(dir(backend)), asked - set(dir(backend))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("timeout", RequestTimeout),
        ("adapter", AdapterRefused),
        ("memory", DoesNotFit),
        (None, LoramuxError),
        ("unknown", LoramuxError),
    ],
)
def test_an_error_code_decides_the_exception_that_is_raised(
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
