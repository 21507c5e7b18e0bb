"""Real servers that have lost an adapter's bytes, and fetch them from where they first came."""

from __future__ import annotations

import shutil
from pathlib import Path
from uuid import uuid4

import obstore
import pytest
from obstore.store import S3Store

from tests.registry_scene import Scene, ask, client_of, push
from tests.s3_server import S3Server

NAME, OTHER = "acme/sql", "acme/chat"


class Bucket:
    def __init__(self, server: S3Server) -> None:
        self.folder = uuid4().hex
        self.source = f"s3://{server.bucket}/{self.folder}"
        self.environment = {
            "AWS_ENDPOINT_URL": server.endpoint,
            "AWS_ACCESS_KEY_ID": server.access_key_id,
            "AWS_SECRET_ACCESS_KEY": server.secret_access_key,
        }
        self._store = S3Store(
            server.bucket,
            endpoint=server.endpoint,
            access_key_id=server.access_key_id,
            secret_access_key=server.secret_access_key,
            client_options={"allow_http": True},
        )

    def upload(self, folder: Path) -> None:
        for path in folder.iterdir():
            obstore.put(self._store, f"{self.folder}/{path.name}", path.read_bytes())


@pytest.fixture
def bucket(s3_server: S3Server) -> Bucket:
    return Bucket(s3_server)


def empty_store(scene: Scene) -> None:
    """As a gc with another registry would, while the server runs."""
    for name in ("records", "blobs", "views"):
        for path in list((scene.data / "store" / name).iterdir()):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.slow
def test_bytes_that_a_new_machine_lacks_come_from_the_source_or_are_refused(
    tmp_path: Path, bucket: Bucket
) -> None:
    scene = Scene(tmp_path)
    cid, other = scene.make_adapter("v1", seed=1), scene.make_adapter("v2", seed=2)
    bucket.upload(scene.adapters / "v1")
    with (
        scene.serving("one", environment=bucket.environment) as server,
        client_of(server) as client,
    ):
        assert push(client, f"{NAME}@1.0.0", bucket.source) == cid
        first = ask(client, NAME)

    shutil.rmtree(scene.data / "store")
    with (
        scene.serving("two", environment=bucket.environment) as server,
        client_of(server) as client,
    ):
        again = ask(client, NAME)
    assert again["adapter_cid"] == first["adapter_cid"] == cid

    shutil.rmtree(scene.data / "store")
    bucket.upload(scene.adapters / "v2")
    with (
        scene.serving("three", environment=bucket.environment) as server,
        client_of(server) as client,
    ):
        body = {"model": NAME, "prompt": "The quick", "max_tokens": 2}
        refused = client.post("/v1/completions", json=body)
    assert refused.status_code == 422, refused.text
    error = refused.json()["error"]
    assert error["reason"] == "source_changed"
    assert all(named in error["message"] for named in (cid, other, bucket.source))


@pytest.mark.slow
def test_a_running_server_whose_tiers_have_all_lost_it_fetches_it_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    cid = scene.make_adapter("v1", seed=1, rank=16)
    scene.make_adapter("v2", seed=2, rank=16)
    # Room for one adapter on the device and one in host memory, and no disk tier.
    flags = ["--adapter-memory-fraction", "0.003", "--max-cpu-loras", "1", "--disk-space", "0"]
    with scene.serving("one", *flags) as server, client_of(server) as client:
        push(client, f"{NAME}@1.0.0", "v1")
        push(client, f"{OTHER}@1.0.0", "v2")
        ask(client, NAME)
        ask(client, OTHER)
        empty_store(scene)
        again = ask(client, NAME)
        assert (again["adapter_cid"], again["tier_found"]) == (cid, "source")
        assert list((scene.data / "store" / "records").iterdir()), "it was not kept"
