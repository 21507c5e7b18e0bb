"""Vercel's `ai`, with its providers for OpenAI-compatible servers and for OpenAI."""

from __future__ import annotations

import pytest

from tests.clients.live import Live
from tests.clients.node_case import needs_node, run_case

CLIENT = "ai"
shows = pytest.mark.shows
pytestmark = needs_node


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("generateText", marks=shows("text", "adapters")),
        pytest.param("streamText", marks=shows("stream")),
        pytest.param("generateObject", marks=shows("typed")),
        pytest.param("tools", marks=shows("tools", "loop")),
        pytest.param("embedMany", marks=shows("embeddings")),
        pytest.param("responses", marks=shows("responses")),
        pytest.param("errors", marks=shows("errors")),
    ],
)
def test_case(live: Live, case: str) -> None:
    run_case(live, "ai.mjs", case)
