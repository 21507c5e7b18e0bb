from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from loramux.errors import SourceFailed, SourceForbidden
from loramux.sources.config import FetchLimits, SourceConfig
from loramux.sources.origins.base import SourceChanged
from loramux.sources.origins.http import HttpOrigin
from loramux.sources.parse import parse_source
from tests.fault_server import Answer, Fault, FaultServer
from tests.unit.sources.source_factory import (
    CONFIG,
    CONFIG_NAME,
    FAST,
    IMPATIENT,
    WEIGHTS,
    WEIGHTS_NAME,
)


@contextmanager
def origin_of(url: str, config: SourceConfig, limits: FetchLimits = FAST) -> Iterator[HttpOrigin]:
    origin = HttpOrigin(parse_source(url, config), config.http, limits)
    try:
        yield origin
    finally:
        origin.close()


@pytest.fixture
def origin(web: FaultServer, web_config: SourceConfig) -> Iterator[HttpOrigin]:
    with origin_of(f"{web.url}/pirate", web_config) as origin:
        yield origin


def test_a_file_is_found_and_a_range_of_it_is_read(origin: HttpOrigin, web: FaultServer) -> None:
    file = origin.find(WEIGHTS_NAME)
    assert file is not None
    assert (file.size_bytes, file.can_seek) == (len(WEIGHTS), True)
    assert origin.revision == file.validator
    with origin.read(file, 10, 20) as chunks:
        assert b"".join(chunks) == WEIGHTS[10:20]
    asked = web.requests("GET")[0].headers
    assert (asked["range"], asked["if-range"]) == ("bytes=10-19", file.validator)
    assert asked["accept-encoding"] == "identity"


def test_what_is_missing_is_none_and_what_is_forbidden_says_so(
    origin: HttpOrigin, web: FaultServer
) -> None:
    assert origin.find("other") is None
    web.faults.append(Fault(method="HEAD", answer=Answer(status=401)))
    with pytest.raises(SourceForbidden, match="Configure a token"):
        origin.find(WEIGHTS_NAME)


@pytest.mark.parametrize("status", [405, 501, 403])
def test_servers_without_head_are_asked_by_get(
    origin: HttpOrigin, web: FaultServer, status: int
) -> None:
    web.faults.append(Fault(method="HEAD", answer=Answer(status=status)))
    file = origin.find(CONFIG_NAME)
    assert file is not None
    assert file.size_bytes == len(CONFIG)


def test_a_server_without_ranges_or_etags_is_read_from_the_start(
    origin: HttpOrigin, web: FaultServer
) -> None:
    web.headers = {}
    file = origin.find(WEIGHTS_NAME)
    assert file is not None
    assert (file.can_seek, file.validator) == (False, None)
    web.headers, web.has_etags = {"Accept-Ranges": "bytes"}, False
    file = origin.find(WEIGHTS_NAME)
    assert file is not None
    assert not file.can_seek


def test_another_file_under_the_same_name_is_noticed(origin: HttpOrigin, web: FaultServer) -> None:
    file = origin.find(WEIGHTS_NAME)
    assert file is not None
    web.files[f"pirate/{WEIGHTS_NAME}"] = WEIGHTS[::-1]
    for start in (0, 10):
        with pytest.raises(SourceChanged), origin.read(file, start, len(WEIGHTS)):
            pass


def test_a_cut_and_an_error_are_failures_that_may_pass(
    origin: HttpOrigin, web: FaultServer
) -> None:
    file = origin.find(WEIGHTS_NAME)
    assert file is not None
    web.faults = [Fault(cut_at=100), Fault(answer=Answer(status=502))]
    for reason in ("failed", "status 502"):
        with (
            pytest.raises(SourceFailed, match=reason) as failed,
            origin.read(file, 0, None) as chunks,
        ):
            list(chunks)
        assert failed.value.is_temporary


def test_silence_is_a_failure_that_may_pass(web: FaultServer, web_config: SourceConfig) -> None:
    web.faults = [Fault(method="HEAD", is_silent=True)]
    with (
        origin_of(f"{web.url}/pirate", web_config, IMPATIENT) as origin,
        pytest.raises(SourceFailed, match="in time") as failed,
    ):
        origin.find(WEIGHTS_NAME)
    assert failed.value.is_temporary


def test_names_are_escaped_in_the_url(web: FaultServer, web_config: SourceConfig) -> None:
    web.files = {"prénom/a b #1.safetensors": WEIGHTS}
    with origin_of(f"{web.url}/prénom/a%20b%20%231.safetensors", web_config) as origin:
        assert origin.find("a b #1.safetensors") is not None
