from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from loramux.sources.config import HttpConfig, HubConfig, S3Config, Secret, SourceConfig
from tests.fault_server import FaultServer
from tests.hub_server import HubServer, hub_for_client
from tests.s3_server import S3Server
from tests.unit.sources.source_factory import FAST, adapter_files


@pytest.fixture
def web() -> Iterator[FaultServer]:
    """Yield a web server with an adapter under /pirate."""
    with FaultServer(adapter_files("pirate")) as server:
        yield server


@pytest.fixture
def web_config(web: FaultServer) -> SourceConfig:
    return SourceConfig(http=HttpConfig(private_hosts=(web.host,)), limits=FAST)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with hub_for_client(monkeypatch, tmp_path) as server:
        yield server


@pytest.fixture
def hub_config(hub: HubServer) -> SourceConfig:
    return SourceConfig(hub=HubConfig(endpoint=hub.url), limits=FAST)


@pytest.fixture
def s3_config(s3_server: S3Server) -> SourceConfig:
    return make_s3_config(s3_server, s3_server.endpoint)


@pytest.fixture
def s3_proxy(s3_server: S3Server) -> Iterator[FaultServer]:
    """Yield a proxy of the real server that fails on demand."""
    with FaultServer(upstream=s3_server.endpoint) as server:
        yield server


@pytest.fixture
def s3_proxy_config(s3_server: S3Server, s3_proxy: FaultServer) -> SourceConfig:
    return make_s3_config(s3_server, s3_proxy.url)


def make_s3_config(server: S3Server, endpoint: str) -> SourceConfig:
    return SourceConfig(
        s3=S3Config(
            endpoint=endpoint,
            region="us-east-1",
            access_key_id=Secret(server.access_key_id),
            secret_access_key=Secret(server.secret_access_key),
        ),
        limits=FAST,
    )
