"""`loramux push`: stored versions, refusals and sources."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest

from loramux.cli.console import ByteView
from loramux.cli.push import FetchOptions, source_config, source_folder, typed_hosts
from loramux.errors import LoramuxError
from tests.adapter_factory import (
    lora_config_dict,
    lora_tensors,
    tiny_llama,
    tiny_llama_config,
    write_adapter,
)
from tests.cli_factory import NAME, Shell
from tests.fault_server import FaultServer
from tests.s3_server import S3Server


def stored(shell: Shell) -> tuple[int, int]:
    return shell.in_library(lambda found: (len(found.store.cids()), len(found.registry.cids())))


def test_a_pushed_adapter_is_stored_under_its_name_and_promoted(shell: Shell) -> None:
    output = shell.ok("push", shell.adapter(), f"{NAME}@1.4.2", "--alias", "prod")
    cid = shell.in_library(lambda library: library.registry.resolve(f"{NAME}@prod").cid)
    assert "Pushed   alice/flagger@1.4.2" in output
    assert cid in output
    assert "alice/flagger@prod → 1.4.2" in output
    assert shell.targets() == [("1.4.2", 1)]


def test_without_a_version_the_next_one_is_taken(shell: Shell) -> None:
    shell.push(f"{NAME}@1.4.2", seed=1)
    assert f"{NAME}@1.4.3" in shell.ok("push", shell.adapter(2), NAME)


def test_pushing_the_same_bytes_again_succeeds_and_others_are_refused(shell: Shell) -> None:
    shell.push(f"{NAME}@1.4.2", seed=1)
    assert "Known    alice/flagger@1.4.2" in shell.ok("push", shell.adapter(1), f"{NAME}@1.4.2")
    refused = shell.run("push", shell.adapter(2), f"{NAME}@1.4.2")
    assert refused.exit_code == 1
    assert "Versions never change" in refused.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    "words",
    [["alice/flagger@prod"], ["alice/../x"], [f"{NAME}@1.0.0", "--alias", "latest"], []],
    ids=["alias for a version", "odd name", "alias that cannot move", "no name"],
)
def test_wrong_usage_is_2_and_nothing_is_stored(words: list[str], shell: Shell) -> None:
    assert shell.run("push", shell.adapter(), *words).exit_code == 2
    assert stored(shell) == (0, 0)


def test_an_invalid_adapter_is_refused_and_not_stored(shell: Shell, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    pickled = shell.adapter(1)
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    for folder in (empty, pickled, tmp_path / "absent"):
        result = shell.run("push", folder, f"{NAME}@1.0.0")
        assert result.exit_code == 1
        assert result.stderr.startswith("error: ")
    assert stored(shell) == (0, 0)


def test_the_check_on_a_base_refuses_an_adapter_of_another_shape(
    shell: Shell, tmp_path: Path
) -> None:
    config = tiny_llama_config()
    tiny_llama(config).save_pretrained(tmp_path / "base")
    good = write_adapter(tmp_path / "good", lora_config_dict(), lora_tensors(config))
    other = lora_tensors(tiny_llama_config(hidden_size=48))
    bad = write_adapter(tmp_path / "bad", lora_config_dict(), other)
    refused = shell.run("push", bad, f"{NAME}@1.0.0", "--check-base", tmp_path / "base")
    assert refused.exit_code == 1
    assert "REFUSED (wrong_shape)" in refused.stderr
    assert stored(shell) == (0, 0)
    shell.ok("push", good, f"{NAME}@1.0.0", "--check-base", tmp_path / "base")
    assert stored(shell) == (1, 1)


def test_an_adapter_larger_than_allowed_is_refused(shell: Shell) -> None:
    refused = shell.run("push", shell.adapter(), f"{NAME}@1.0.0", "--max-adapter-size", "100")
    assert refused.exit_code == 1 and "100" in refused.stderr
    assert shell.run("push", shell.adapter(), NAME, "--max-adapter-size", "much").exit_code == 2
    assert stored(shell) == (0, 0)


def test_an_adapter_is_pushed_from_a_url(shell: Shell) -> None:
    with FaultServer({f"x/{p.name}": p.read_bytes() for p in shell.adapter().iterdir()}) as web:
        words = ["push", f"{web.url}/x", f"{NAME}@1.0.0"]
        refused = shell.run(*words)
        assert refused.exit_code == 1 and "private" in refused.stderr.replace("\n", " ")
        assert stored(shell) == (0, 0)
        shell.ok(*words, "--private-http-hosts", web.host)
    assert stored(shell) == (1, 1)
    assert list((shell.data / "fetch").iterdir()) == []


def test_a_push_reaches_the_remote_store_and_a_pull_elsewhere_finds_it(
    shell: Shell, tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_access_key)
    url = f"s3://{s3_server.bucket}/{uuid4().hex}"
    remote = ["--remote-store", url]
    assert shell.run("push", shell.adapter(), f"{NAME}@1.0.0", *remote).exit_code == 0
    registry = ["--registry", shell.data / "registry.db"]
    elsewhere = ["--data", tmp_path / "elsewhere", *registry]
    without = shell.run_bare("pull", NAME, tmp_path / "copy", *elsewhere)
    assert without.exit_code == 1 and not (tmp_path / "copy").exists()
    assert shell.run_bare("verify", *elsewhere).exit_code == 1
    assert shell.run_bare("verify", *elsewhere, *remote).exit_code == 0
    pulled = shell.run_bare("pull", NAME, tmp_path / "copy", *elsewhere, *remote)
    assert pulled.exit_code == 0, pulled.output
    assert s3_server.secret_access_key not in pulled.output + without.output
    copied = {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()}
    assert copied == {path.name: path.read_bytes() for path in shell.adapter().iterdir()}


OPTIONS = FetchOptions(data=None, max_adapter_bytes=1000, timeout_s=3, num_workers=2)


def test_a_folder_is_used_in_place() -> None:
    with source_folder("some/folder", OPTIONS, ByteView()) as (folder, name):
        assert folder == Path("some/folder")
        assert name == str(Path.cwd() / "some" / "folder"), "it cannot be found from elsewhere"


@pytest.mark.parametrize(
    ("source", "hosts"),
    [
        ("https://example.com/a", ("example.com",)),
        ("http://example.com:8080/a", ("example.com:8080",)),
        ("hf:owner/name", ()),
        ("https://", ()),
        ("https://[broken/a", ()),
    ],
)
def test_the_host_that_was_typed_is_allowed_and_no_other(
    source: str, hosts: tuple[str, ...]
) -> None:
    assert typed_hosts(source) == hosts
    config = source_config(source, OPTIONS)
    assert (config.http.allowed_hosts, config.http.private_hosts) == (hosts, ())
    limits = config.limits
    assert (limits.max_total_bytes, limits.timeout_s, limits.num_workers) == (1000, 3, 2)


@pytest.mark.parametrize("source", ["https://u:hunter2@example.com/a", "https://", "s3://"])
def test_an_odd_id_is_refused_without_being_fetched(source: str, tmp_path: Path) -> None:
    with (
        pytest.raises(LoramuxError) as refused,
        source_folder(source, OPTIONS, ByteView()),
    ):
        pass
    assert "hunter2" not in str(refused.value)
