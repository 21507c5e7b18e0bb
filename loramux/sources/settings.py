"""Where adapters may be fetched from and within which limits, by the settings of `serve`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from loramux.config.serve import ServeConfig
from loramux.sources.config import (
    AzureConfig,
    FetchLimits,
    GcsConfig,
    HttpConfig,
    HubConfig,
    S3Config,
    SourceConfig,
)
from loramux.sources.environment import read_environment

SOURCE_SETTINGS = (
    "allowed_roots",
    "allowed_http_hosts",
    "private_http_hosts",
    "allowed_buckets",
    "allowed_hub_owners",
    "max_adapter_size",
    "fetch_timeout_s",
    "fetch_workers",
)


def source_config(config: ServeConfig, environment: Mapping[str, str] = os.environ) -> SourceConfig:
    buckets = config.allowed_buckets or None
    found = SourceConfig(
        allowed_roots=tuple(map(Path, config.allowed_roots)),
        hub=HubConfig(allowed_owners=config.allowed_hub_owners or None),
        s3=S3Config(allowed_buckets=buckets),
        gcs=GcsConfig(allowed_buckets=buckets),
        azure=AzureConfig(allowed_buckets=buckets),
        http=HttpConfig(
            allowed_hosts=config.allowed_http_hosts, private_hosts=config.private_http_hosts
        ),
        limits=FetchLimits(
            max_file_bytes=config.max_adapter_size,
            max_total_bytes=config.max_adapter_size,
            timeout_s=config.fetch_timeout_s,
            num_workers=config.fetch_workers,
        ),
    )
    return read_environment(environment, found)
