from __future__ import annotations

import socket
from pathlib import Path

import pytest

from loramux.base.progress import SILENT
from loramux.base.signing import make_key_files, read_private_key
from loramux.config.access import AccessConfig
from loramux.config.fields import LoraModule
from loramux.config.file import load_serve_config
from loramux.config.paths import REGISTRY_VARIABLE
from loramux.config.serve import ServeConfig
from loramux.errors import AdapterNotFound, AdapterRefused, InvalidRequest, StoreFull
from loramux.http_server.serving import listen
from loramux.launch.serve import (
    check_exposure,
    make_authenticator,
    opened_registry,
    serve,
    server_options,
    with_fetched_adapters,
)
from loramux.models.default_model import default_model_path
from loramux.registry.audit import read_anchor
from loramux.registry.registry import Registry
from loramux.server.auth.authentication import CredentialAuthenticator
from loramux.sources.config import HttpConfig, SourceConfig
from tests.fault_server import FaultServer
from tests.store_factory import write_tiny
from tests.unit.sources.source_factory import FAST, adapter_files

REGISTRY_KEY = "lmx_000000000000_" + "A" * 43


def test_a_port_in_use_fails_before_the_model_is_loaded() -> None:
    steps: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ServeConfig(port=taken.getsockname()[1])
        with pytest.raises(InvalidRequest, match="Cannot listen on .* --port") as caught:
            serve(
                config,
                progress=lambda what, _: steps.append(what),
                downloads=SILENT,
                on_ready=print,
            )
    assert caught.value.param == "port" and not steps


def test_an_unknown_prewarm_adapter_fails_before_the_model_is_loaded() -> None:
    steps: list[str] = []
    config = ServeConfig(
        port=0,
        registry="none",
        lora_modules=(LoraModule("given", "/nowhere"),),
        prewarm_adapters=("given", "acme/sql"),
    )
    with pytest.raises(AdapterNotFound, match="--prewarm-adapters names 'acme/sql'.*no registry"):
        serve(config, progress=lambda what, _: steps.append(what), downloads=SILENT, on_ready=print)
    assert not steps


def test_remote_adapters_are_fetched_into_the_cache_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAMUX_CACHE", str(tmp_path))
    files = adapter_files("pirate")
    stages: list[str] = []
    with FaultServer(files) as web:
        sources = SourceConfig(http=HttpConfig(private_hosts=(web.host,)), limits=FAST)
        given = load_serve_config(
            {"lora_modules": ["here=~/sql", f"web={web.url}/pirate"]}, None
        ).lora_modules
        assert given[1].path == f"{web.url}/pirate"
        config = with_fetched_adapters(
            ServeConfig(lora_modules=given), sources, lambda stage, share: stages.append(stage)
        )
    here, fetched = config.lora_modules
    assert here == given[0] and fetched.name == "web"
    assert Path(fetched.path).is_relative_to(tmp_path / "adapters")
    found = {f"pirate/{path.name}": path.read_bytes() for path in Path(fetched.path).iterdir()}
    assert found == files
    assert set(stages) == {"Fetching adapter web"}


def test_answers_do_not_wait_for_acknowledgements() -> None:
    """asyncio sets TCP_NODELAY only where the listener says that its protocol is TCP."""
    with listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


@pytest.mark.parametrize(
    ("receipts", "in_body", "in_streams"),
    [("auto", True, False), ("on", True, True), ("off", False, False)],
)
def test_without_a_registry_streams_have_receipts_only_when_asked(
    receipts: str, in_body: bool, in_streams: bool, tmp_path: Path
) -> None:
    environment = {"XDG_DATA_HOME": str(tmp_path)}
    with opened_registry(ServeConfig(receipts=receipts), environment) as (registry, issuer):
        assert registry is None and issuer.writer is None
        assert (issuer.is_on, issuer.in_streams) == (in_body, in_streams)
        assert issuer.pool_id == socket.gethostname()


def test_settings_and_environment_locate_the_registry(tmp_path: Path) -> None:
    config = ServeConfig(data=str(tmp_path / "data"), pool_id="p", home_tenant="acme")
    with opened_registry(config, environment={}) as (registry, issuer):
        assert registry is not None and issuer.writer is not None and issuer.in_streams
        assert (issuer.pool_id, issuer.home_tenant) == ("p", "acme")
        assert registry.registry.adapters() == []
    assert (tmp_path / "data" / "registry.db").exists()
    environment = {REGISTRY_VARIABLE: str(tmp_path / "named.db"), "LORAMUX_DATA": str(tmp_path)}
    with opened_registry(ServeConfig(), environment) as (registry, _):
        assert registry is not None
    assert (tmp_path / "named.db").exists()


def test_settings_of_signatures_and_the_audit_log_reach_the_registry(tmp_path: Path) -> None:
    key, anchor = tmp_path / "key.pem", tmp_path / "anchor"
    key_id = make_key_files(key)
    access = AccessConfig(require_signed=True, audit_anchor=str(anchor))
    config = ServeConfig(data=str(tmp_path / "data"), receipt_key=str(key), access=access)
    with opened_registry(config, environment={}) as (registry, _):
        assert registry is not None
        with pytest.raises(AdapterRefused, match="no signature"):
            registry.library.push(write_tiny(tmp_path / "a", 1), "acme/sql")
        (entry,) = registry.registry.audit.entries()
        assert (entry.entry.result, entry.entry.key_id) == ("refused", key_id)
        public = read_private_key(key).public_key()
        report = registry.registry.audit.verify(keys=[public], anchors=[read_anchor(anchor)])
        assert not report.faults and report.num_signed == 1


def test_the_default_registry_is_served_if_it_exists(tmp_path: Path) -> None:
    environment = {"XDG_DATA_HOME": str(tmp_path)}
    path = tmp_path / "loramux" / "registry.db"
    with opened_registry(ServeConfig(), environment) as (registry, issuer):
        assert registry is None and not issuer.in_streams
    assert not path.exists(), "a server makes no registry that nobody asked for"
    with Registry(path):
        pass
    with opened_registry(ServeConfig(), environment) as (registry, issuer):
        assert registry is not None and issuer.writer is not None and issuer.in_streams
    with opened_registry(ServeConfig(registry="none"), environment) as (registry, _):
        assert registry is None
    options = server_options(ServeConfig(), base_name="b", environment=environment)
    assert options.unopened_registry == str(path)


def test_the_store_has_the_tiers_and_limits_of_the_settings(tmp_path: Path) -> None:
    config = ServeConfig(
        data=str(tmp_path), shared_cache="redis://:hunter2@127.0.0.1:1", store_space=1
    )
    environment = {"LORAMUX_REMOTE_STORE": "s3://bucket/folder"}
    with opened_registry(config, environment) as (registry, _):
        assert registry is not None
        tiers = [tier.tier for tier in registry.library.store.tier_stats()]
        with pytest.raises(StoreFull):
            registry.library.push(write_tiny(tmp_path / "a"), "a/b@1.0.0")
    assert tiers == ["shared_cache", "remote_store"]
    assert "hunter2" not in repr(config)


def test_a_key_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    file = tmp_path / "key.pem"
    make_key_files(file)
    environment = {"XDG_DATA_HOME": str(tmp_path)}
    with opened_registry(ServeConfig(receipt_key=str(file)), environment) as (_, issuer):
        assert issuer.key is not None
    file.write_text("no key")
    with (
        pytest.raises(InvalidRequest, match="Ed25519"),
        opened_registry(ServeConfig(receipt_key=str(file)), environment),
    ):
        pass


@pytest.mark.parametrize(
    ("value", "is_allowed"), [("1", True), ("True", True), ("0", False), ("", False), (None, False)]
)
def test_vllms_variable_allows_its_calls(value: str | None, is_allowed: bool) -> None:
    environment = {} if value is None else {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": value}
    options = server_options(ServeConfig(), base_name="b", environment=environment)
    assert options.allow_runtime_lora_updating is is_allowed
    given = ServeConfig(allow_runtime_lora_updating=True)
    assert server_options(given, base_name="b", environment={}).allow_runtime_lora_updating


def keys_of(config: ServeConfig, environment: dict[str, str]) -> CredentialAuthenticator:
    return make_authenticator(config, None, environment)


def access(**fields: object) -> ServeConfig:
    return load_serve_config({**fields})


@pytest.mark.parametrize("variable", ["LORAMUX_API_KEY", "VLLM_API_KEY"])
def test_keys_come_from_the_flag_or_the_environment(variable: str) -> None:
    assert not keys_of(ServeConfig(), {}).needs_key
    assert keys_of(ServeConfig(), {variable: "letmein"}).needs_key
    assert keys_of(access(api_key=["letmein"]), {}).needs_key
    # The key that commands send to other servers gives no rights on this one.
    assert not keys_of(ServeConfig(), {variable: REGISTRY_KEY}).needs_key


def test_a_key_is_not_shown_in_errors_or_by_repr() -> None:
    config = access(api_key=["letmein"])
    assert "letmein" not in repr(config) + repr(keys_of(config, {}))
    for wrong in (["let mein"], ["letmein" * 100], ["letmein", ""]):
        with pytest.raises(InvalidRequest) as raised:
            access(api_key=wrong)
        assert "mein" not in str(raised.value)
    with pytest.raises(InvalidRequest, match="key of a registry"):
        keys_of(access(api_key=[REGISTRY_KEY]), {})
    with pytest.raises(InvalidRequest, match="ASCII"):
        keys_of(ServeConfig(), {"VLLM_API_KEY": "let mein"})


def test_other_machines_are_served_only_with_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("LORAMUX_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    steps: list[str] = []
    config = ServeConfig(host="0.0.0.0", port=0, registry="none", model=str(default_model_path()))
    with pytest.raises(InvalidRequest, match="insecure-no-auth") as raised:
        serve(config, progress=lambda what, _: steps.append(what), downloads=SILENT, on_ready=print)
    assert raised.value.param == "host" and not steps


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"host": "127.0.0.1"}, ""),
        ({"host": "::1"}, ""),
        ({"host": "0.0.0.0"}, "letmein"),
        ({"host": "0.0.0.0", "insecure_no_auth": True}, ""),
        ({"host": "127.0.0.1", "tenant_header": "x-tenant"}, ""),
    ],
)
def test_what_maylisten(fields: dict[str, object], key: str) -> None:
    config = access(**fields)
    with listen(config.host, 0) as listener:
        check_exposure(config, listener, keys_of(config, {"LORAMUX_API_KEY": key}))


def test_a_tenant_header_needs_proxies_where_keys_are_needed() -> None:
    fields = {"tenant_header": "x-tenant", "api_key": ["letmein"]}
    with listen("127.0.0.1", 0) as listener:
        with pytest.raises(InvalidRequest, match="--trusted-proxies"):
            check_exposure(access(**fields), listener, keys_of(access(**fields), {}))
        config = access(**fields, trusted_proxies=["10.0.0.0/8"])
        check_exposure(config, listener, keys_of(config, {}))
    with pytest.raises(InvalidRequest, match="networks"):
        access(trusted_proxies=["gateway"])
