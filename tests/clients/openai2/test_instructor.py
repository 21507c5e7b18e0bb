"""instructor, in its modes."""

from __future__ import annotations

from typing import Any

import instructor
import pytest
from instructor import Mode
from openai import OpenAI
from pydantic import BaseModel

from tests.clients.live import MESSAGES, Live
from tests.clients.schemas import City

CLIENT = "instructor"
shows = pytest.mark.shows


def client_of(live: Live, mode: Mode) -> Any:
    return instructor.from_openai(OpenAI(base_url=live.v1, api_key="none"), mode=mode)


def asked(**more: Any) -> Any:
    given = {"model": "pirate", "messages": MESSAGES, "max_tokens": 100, "max_retries": 0}
    return given | {"response_model": City} | more


@shows("typed", "tools", "adapters")
@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA])
def test_modes_that_enforce_the_schema(live: Live, mode: Mode) -> None:
    assert isinstance(client_of(live, mode).create(**asked()), City)


@shows("typed")
def test_json_mode(live: Live) -> None:
    """Only any JSON object is enforced; the fields come from the adapter's training."""

    class Answer(BaseModel):
        answer: str
        topic: str

    fields = asked(model="json", response_model=Answer, temperature=0)
    assert isinstance(client_of(live, Mode.JSON).create(**fields), Answer)


@shows("stream")
@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.JSON_SCHEMA])
def test_partial_answers_of_a_stream(live: Live, mode: Mode) -> None:
    parts = list(client_of(live, mode).create_partial(**asked()))
    assert parts and City.model_validate(parts[-1].model_dump())


@shows("errors")
def test_errors(live: Live) -> None:
    with pytest.raises(Exception, match="no-such-model"):
        client_of(live, Mode.TOOLS).create(**asked(model="no-such-model"))
