"""Real servers whose data folder is empty: adapters come from Redis, or from the bucket."""

from __future__ import annotations

import shutil
from pathlib import Path
from uuid import uuid4

import httpx2
import pytest
from redis import Redis

from tests.registry_scene import Scene, ask, client_of, push, send
from tests.s3_server import S3Server

NAME = "acme/sql"
AWAY = "redis://:hunter2@127.0.0.1:1/0"


def credentials(server: S3Server) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_ACCESS_KEY_ID": server.access_key_id,
        "AWS_SECRET_ACCESS_KEY": server.secret_access_key,
    }


def store_hits(client: httpx2.Client) -> dict[str, float]:
    lines = client.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("loramux:store_tier_hits_total{")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in found}


def forget_store(scene: Scene) -> None:
    """As on a new machine that shares the registry alone."""
    shutil.rmtree(scene.data / "store")


@pytest.mark.slow
def test_an_adapter_that_only_the_tiers_have_is_served(
    tmp_path: Path, redis_url: str, s3_server: S3Server
) -> None:
    scene, environment = Scene(tmp_path), credentials(s3_server)
    cid = scene.make_adapter("v1", seed=1)
    remote = ["--remote-store", f"s3://{s3_server.bucket}/{uuid4().hex}"]
    with Redis.from_url(redis_url) as redis:
        redis.flushall()
    with (
        scene.serving("one", *remote, environment=environment) as server,
        client_of(server) as client,
    ):
        assert push(client, f"{NAME}@1.0.0", "v1") == cid
        expected = ask(client, NAME)
    assert (expected["adapter_cid"], expected["status"]) == (cid, "completed")

    forget_store(scene)
    cached = [*remote, "--shared-cache", redis_url]
    with (
        scene.serving("two", *cached, environment=environment) as server,
        client_of(server) as client,
    ):
        assert ask(client, NAME)["adapter_cid"] == cid
        assert store_hits(client) == {"shared_cache": 0, "remote_store": 3}

    forget_store(scene)
    with (
        scene.serving("three", "--shared-cache", redis_url) as server,
        client_of(server) as client,
    ):
        assert ask(client, NAME)["adapter_cid"] == cid, "the cache was not filled from the bucket"
        assert store_hits(client) == {"shared_cache": 3}

    forget_store(scene)
    broken = [*remote, "--shared-cache", AWAY]
    with (
        scene.serving("four", *broken, environment=environment) as server,
        client_of(server) as client,
    ):
        body = {"model": NAME, "prompt": "The quick", "max_tokens": 2}
        send(client, "/v1/completions", body)
        metrics = client.get("/metrics").text
        assert 'loramux:store_tier_failures_total{tier="shared_cache"} 1.0' in metrics
        kept = client.get("/v1/receipts").text
    for log in tmp_path.glob("*.log"):
        said = log.read_text() + kept
        assert s3_server.secret_access_key not in said and "hunter2" not in said
    assert (tmp_path / "four.log").read_text().count("Redis cache failed") == 1
