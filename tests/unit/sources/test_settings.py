from __future__ import annotations

from dataclasses import fields

from loramux.config.serve import ServeConfig
from loramux.sources.config import SOURCE_SETTINGS, FetchLimits, source_config


def test_the_settings_become_the_policy_for_sources() -> None:
    config = ServeConfig(
        allowed_http_hosts=("a.example",),
        private_http_hosts=("10.0.0.1:80",),
        allowed_buckets=("mine",),
        allowed_hub_owners=("me",),
        max_adapter_size=100,
        fetch_timeout_s=5,
        fetch_workers=2,
    )
    sources = source_config(config, {"AWS_ENDPOINT_URL": "http://s3.example"})
    assert sources.http.allows("https", "a.example", 443)
    assert not sources.http.allows_private("https", "a.example", 443)
    assert sources.http.allows_private("http", "10.0.0.1", 80)
    assert {sources.s3.allowed_buckets, sources.gcs.allowed_buckets} == {("mine",)}
    assert sources.hub.allowed_owners == ("me",) and sources.s3.endpoint == "http://s3.example"
    limits = sources.limits
    assert (limits.max_file_bytes, limits.timeout_s, limits.num_workers) == (100, 5, 2)
    assert source_config(ServeConfig(), {}).limits == FetchLimits()


def test_every_setting_that_is_told_to_other_commands_exists() -> None:
    assert set(SOURCE_SETTINGS) <= {setting.name for setting in fields(ServeConfig)}
