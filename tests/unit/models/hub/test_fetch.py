from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from loramux.errors import ModelNotFetched, UnsupportedModel
from loramux.models.digests import file_digest
from loramux.models.folder import describe_model, model_name
from loramux.models.hub.fetch import fetch_model
from loramux.types.hub_id import parse_hub_id
from tests.fault_server import Answer, Fault
from tests.hub_server import SIGNATURE, HubRepository, HubServer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
TOKEN = "hf_token_of_a_tester"
WEIGHTS = bytes(range(256)) * 400
OLD = b"old" * 1000
GGUF = b"GGUF" * 500


def folder_files(weights: bytes = WEIGHTS, **config: object) -> dict[str, bytes]:
    return {
        "config.json": json.dumps(CONFIG | config).encode(),
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "model.safetensors": weights,
    }


NOT_NEEDED = {
    "README.md": b"# hi",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"the same again",
    "original/consolidated.00.pth": b"pickle",
    "onnx/model.onnx": b"onnx",
}


@pytest.fixture(autouse=True)
def repositories(hub: HubServer) -> None:
    files = {**folder_files(), **NOT_NEEDED}
    hub.repositories = {
        "acme/base": HubRepository({"main": files, "v1": folder_files(OLD)}),
        "acme/gated": HubRepository({"main": folder_files()}, readers=frozenset({TOKEN})),
        "acme/gguf": HubRepository(
            {"main": {"tiny-Q4_0.gguf": GGUF, "tiny-F16.gguf": GGUF + b"!"}, "one": {"a.gguf": OLD}}
        ),
    }


class Recorder:
    """A ByteSink that keeps what it is told."""

    def __init__(self) -> None:
        self.what = ""
        self.total_bytes: int | None = None
        self.added: list[int] = []

    def begin(self, what: str, total_bytes: int | None) -> None:
        self.what, self.total_bytes = what, total_bytes

    def add(self, num_bytes: int) -> None:
        self.added.append(num_bytes)


def fetch(text: str, sink: Recorder | None = None, *, with_weights: bool = True) -> Path:
    hub_id = parse_hub_id(text)
    assert hub_id is not None
    return fetch_model(hub_id, sink=sink or Recorder(), with_weights=with_weights)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def partial_files() -> list[Path]:
    return list(Path(constants.HF_HUB_CACHE).rglob("*.incomplete"))


def set_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_the_first_run_fetches_what_is_served_with_one_bar(hub: HubServer) -> None:
    sink = Recorder()
    folder = fetch("acme/base", sink)
    assert names(folder) == sorted(folder_files())
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert folder.name == hub.repositories["acme/base"].commit_of("main")
    assert model_name(folder) == "acme/base"
    assert sink.what == "Downloading acme/base"
    config_bytes = len(folder_files()["config.json"])
    assert sink.total_bytes == sum(map(len, folder_files().values())) - config_bytes
    assert sum(sink.added) == sink.total_bytes
    assert min(sink.added) > 0
    paths = [seen.path for seen in hub.seen]
    assert "/api/models/acme/base/revision/main" in paths[0]
    assert all(path.endswith("/config.json") for path in paths[1:3])


def test_the_digest_of_the_weights_is_kept_for_the_loader(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch("acme/base")
    monkeypatch.setattr(hashlib, "file_digest", None)
    assert file_digest(folder / "model.safetensors") == hashlib.sha256(WEIGHTS).hexdigest()


def test_the_second_run_asks_for_the_revision_only_and_offline_for_nothing(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fetch("acme/base")
    hub.seen.clear()
    sink = Recorder()
    assert fetch("acme/base", sink) == first
    assert [seen.method for seen in hub.seen] == ["GET"]
    assert sink.total_bytes is None
    set_offline(monkeypatch)
    hub.seen.clear()
    assert fetch("acme/base") == first
    assert hub.seen == []


def test_a_new_commit_is_fetched(hub: HubServer) -> None:
    first = fetch("acme/base")
    hub.repositories["acme/base"].revisions["main"] = folder_files(OLD)
    second = fetch("acme/base")
    assert second != first
    assert (second / "model.safetensors").read_bytes() == OLD


FAULTS = {
    "is away": Fault(answer=Answer(status=503)),
    "sends a page": Fault(answer=Answer(body=b"<html>Please log in</html>")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_hub_that_cannot_be_reached_leaves_the_copy_in_the_cache(
    hub: HubServer, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    first = fetch("acme/base")
    hub.faults.append(FAULTS[fault])
    assert fetch("acme/base") == first
    assert "The copy in the cache is used" in caplog.text


def test_an_interrupted_update_leaves_the_former_commit_for_offline_use(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fetch("acme/base")
    hub.repositories["acme/base"].revisions["main"] = folder_files(OLD)
    hub.storage.faults.append(Fault(answer=Answer(status=500)))
    with pytest.raises(ModelNotFetched, match="status 500.*resumes"):
        fetch("acme/base")
    set_offline(monkeypatch)
    assert fetch("acme/base") == first


def test_a_revision_and_a_commit_are_honoured(hub: HubServer) -> None:
    folder = fetch("acme/base@v1")
    assert (folder / "model.safetensors").read_bytes() == OLD
    hub.seen.clear()
    assert fetch(f"acme/base@{folder.name}") == folder
    assert hub.seen == []


def test_shards_come_from_the_index(hub: HubServer) -> None:
    shards = {"x-1.safetensors": WEIGHTS, "x-2.safetensors": OLD}
    files = {**folder_files(), **NOT_NEEDED, **shards}
    del files["model.safetensors"]
    weight_map = {"a": "x-1.safetensors", "b": "x-2.safetensors"}
    index = json.dumps({"weight_map": weight_map}).encode()
    hub.repositories["acme/base"].revisions["main"] = files | {
        "model.safetensors.index.json": index
    }
    folder = fetch("acme/base")
    wanted = {*folder_files(), *shards, "model.safetensors.index.json"} - {"model.safetensors"}
    assert names(folder) == sorted(wanted)


def test_shapes_need_the_config_only(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch("acme/base", with_weights=False)
    assert names(folder) == ["config.json"]
    assert describe_model(folder).name == "acme/base"
    set_offline(monkeypatch)
    assert fetch("acme/base", with_weights=False) == folder
    with pytest.raises(ModelNotFetched, match="not complete in the cache.*no safetensors"):
        fetch("acme/base")


def test_a_connection_that_breaks_is_resumed_within_the_run(hub: HubServer) -> None:
    hub.storage.faults.append(Fault(cut_at=1000))
    folder = fetch("acme/base")
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.storage.requests("GET")[1].headers["range"] == "bytes=1000-"


def break_off(hub: HubServer) -> None:
    """End a run after 1000 bytes of the weights."""
    hub.storage.faults += [Fault(cut_at=1000), Fault(answer=Answer(status=502))]
    with pytest.raises(ModelNotFetched, match="resumes"):
        fetch("acme/base")
    assert [path.stat().st_size for path in partial_files()] == [1000]
    hub.storage.seen.clear()


def test_the_next_run_resumes(hub: HubServer) -> None:
    break_off(hub)
    sink = Recorder()
    folder = fetch("acme/base", sink)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert [seen.headers["range"] for seen in hub.storage.requests("GET")] == ["bytes=1000-"]
    assert sum(sink.added) == sink.total_bytes
    assert partial_files() == []


def test_a_damaged_part_is_found_and_deleted(hub: HubServer) -> None:
    break_off(hub)
    partial_files()[0].write_bytes(b"?" * 1000)
    with pytest.raises(ModelNotFetched, match="does not match the SHA-256"):
        fetch("acme/base")
    assert partial_files() == []
    assert (fetch("acme/base") / "model.safetensors").read_bytes() == WEIGHTS


def test_a_page_in_place_of_weights_is_not_kept(hub: HubServer) -> None:
    hub.storage.faults.append(Fault(answer=Answer(body=b"<html>Please log in</html>")))
    with pytest.raises(ModelNotFetched, match="such as the page of a proxy"):
        fetch("acme/base")
    assert [path.stat().st_size for path in partial_files()] == [0]


def test_an_interruption_keeps_the_received_part(hub: HubServer) -> None:
    class Interrupting(Recorder):
        def add(self, num_bytes: int) -> None:
            raise KeyboardInterrupt

    hub.storage.faults += [Fault(cut_at=50_000), Fault(is_silent=True)]
    with pytest.raises(KeyboardInterrupt):
        fetch("acme/base", Interrupting())
    kept = partial_files()[0].read_bytes()
    assert kept
    assert WEIGHTS.startswith(kept)


def test_the_token_stays_on_the_hub(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    fetch("acme/gated")
    assert all(seen.headers["authorization"] == f"Bearer {TOKEN}" for seen in hub.seen)
    assert SIGNATURE in hub.storage.seen[0].path
    assert all("authorization" not in seen.headers for seen in hub.storage.seen)


def test_a_gguf_file_is_named_or_the_only_one(hub: HubServer) -> None:
    file = fetch("acme/gguf:tiny-Q4_0.gguf")
    assert file.read_bytes() == GGUF
    assert model_name(file) == "acme/gguf"
    assert fetch("acme/gguf@one").read_bytes() == OLD
    assert fetch("acme/gguf:a.gguf@one").read_bytes() == OLD


def test_a_gguf_file_is_found_offline(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    file = fetch("acme/gguf:tiny-Q4_0.gguf")
    set_offline(monkeypatch)
    assert fetch("acme/gguf:tiny-Q4_0.gguf") == file
    with pytest.raises(ModelNotFetched, match=r"tiny-F16.gguf is missing.*HF_HUB_OFFLINE"):
        fetch("acme/gguf:tiny-F16.gguf")


def without(name: str) -> dict[str, bytes]:
    return {path: content for path, content in folder_files().items() if path != name}


REFUSED = {
    "pickles": (
        {**without("model.safetensors"), "pytorch_model.bin": b"x"},
        "only pickle weights.*safetensors",
    ),
    "no weights": (without("model.safetensors"), "no safetensors weights"),
    "no tokenizer": (without("tokenizer.json"), "no tokenizer.json"),
    "no model": ({"README.md": b"x"}, "no config.json and no GGUF"),
    "an adapter": ({"adapter_config.json": b"{}"}, "holds a LoRA adapter.*--lora-modules"),
    "architecture": (
        folder_files(architectures=["MambaForCausalLM"]),
        "MambaForCausalLM is not supported; valid values: LlamaForCausalLM, .*Nothing else",
    ),
    "quantised": (
        folder_files(quantization_config={"quant_method": "aqlm"}),
        "quantised as aqlm, which is not supported. Use .*Nothing else",
    ),
    "quantised beside the config": (
        {**folder_files(), "hf_quant_config.json": b'{"quantization": {"quant_algo": "W4A8_AWQ"}}'},
        "W4A8_AWQ of ModelOpt, which is not supported. Use .*Nothing else",
    ),
    "shards without index": (
        {**without("model.safetensors"), "a.safetensors": b"", "b.safetensors": b""},
        "2 safetensors files but no model.safetensors.index.json",
    ),
    "several GGUF files": (
        {"b.gguf": GGUF, "a.gguf": GGUF},
        r"2 GGUF files. Choose one, as acme/odd:a.gguf. There are a.gguf, b.gguf",
    ),
    "a part of a GGUF file": ({"a-00001-of-00002.gguf": GGUF}, "split"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_repository_that_cannot_be_served_is_refused_before_its_weights(
    hub: HubServer, case: str
) -> None:
    files, reason = REFUSED[case]
    hub.repositories["acme/odd"] = HubRepository({"main": files})
    with pytest.raises(UnsupportedModel, match=f"(?s)acme/odd.*{reason}"):
        fetch("acme/odd")
    assert hub.storage.seen == []


def test_a_gguf_file_that_is_not_there_and_its_architecture(hub: HubServer) -> None:
    with pytest.raises(UnsupportedModel, match=r"no file x.gguf. There are tiny-F16.gguf, tiny"):
        fetch("acme/gguf:x.gguf")
    with pytest.raises(UnsupportedModel, match="no GGUF files at all"):
        fetch("acme/base:x.gguf")
    hub.repositories["acme/gguf"].gguf = {"architecture": "mamba"}
    with pytest.raises(UnsupportedModel, match="'mamba' is not supported; valid values: llama"):
        fetch("acme/gguf:tiny-Q4_0.gguf")
    assert hub.storage.seen == []


@pytest.mark.parametrize("status", [401, 404])
def test_an_unknown_repository(hub: HubServer, status: int) -> None:
    hub.missing_status = status
    with pytest.raises(ModelNotFetched, match="no folder acme/nothing here.*private.*HF_TOKEN"):
        fetch("acme/nothing")


def test_an_unknown_revision(hub: HubServer) -> None:
    with pytest.raises(ModelNotFetched, match="acme/base has no revision 'v9'.*commits"):
        fetch("acme/base@v9")


def test_gated_repositories_and_bad_tokens(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ModelNotFetched, match=r"gated, and no token is set \(401\). Accept.*/acme/gated.*HF_TOKEN"
    ):
        fetch("acme/gated")
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(ModelNotFetched, match=r"account has no access to it \(403\)"):
        fetch("acme/gated")
    hub.expired_tokens.add("hf_other")
    with pytest.raises(ModelNotFetched, match=r"refused the token \(401\).*expired"):
        fetch("acme/base")


def test_offline_without_a_copy(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    set_offline(monkeypatch)
    with pytest.raises(ModelNotFetched, match="not in the cache .*hub-cache.*HF_HUB_OFFLINE"):
        fetch("acme/base")
    assert hub.seen == []


def test_a_silent_hub_and_one_that_is_away(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
    hub.faults.append(Fault(is_silent=True))
    with pytest.raises(ModelNotFetched, match="did not answer in time.*not in the cache"):
        fetch("acme/base")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelNotFetched, match=r"127.0.0.1:9 cannot be reached \(ConnectError"):
        fetch("acme/base")


def test_too_little_disk(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
    with pytest.raises(ModelNotFetched, match=r"needs 100 KiB .*hub-cache has 1 MiB.*HF_HOME"):
        fetch("acme/base")
    assert hub.storage.seen == []
