"""OpenAI's Node client."""

from __future__ import annotations

import pytest

from tests.clients.live import Live
from tests.clients.node_case import needs_node, run_case

CLIENT = "openai (Node)"
shows = pytest.mark.shows
pytestmark = needs_node


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("text", marks=shows("text", "adapters")),
        pytest.param("stream", marks=shows("stream")),
        pytest.param("parse", marks=shows("typed")),
        pytest.param("tools", marks=shows("tools")),
        pytest.param("runTools", marks=shows("tools", "loop", "stream")),
        pytest.param("embeddings", marks=shows("embeddings")),
        pytest.param("responses", marks=shows("responses", "stream", "typed", "tools")),
        pytest.param("errors", marks=shows("errors")),
    ],
)
def test_case(live: Live, case: str) -> None:
    run_case(live, "openai.mjs", case)
