"""Credentials and endpoints from the environment variables that other tools use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from loramux.sources.config import SourceConfig
from loramux.sources.secret import Secret

T = TypeVar("T")
# The last one is LoRAX's.
S3_ENDPOINT_NAMES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "S3_ENDPOINT_URL")


def read_environment(environment: Mapping[str, str], config: SourceConfig) -> SourceConfig:
    """The config with its gaps filled; what it already says stays."""

    def text(*names: str) -> str | None:
        return next((environment[name] for name in names if environment.get(name)), None)

    def secret(*names: str) -> Secret | None:
        value = text(*names)
        return None if value is None else Secret(value)

    s3, azure = config.s3, config.azure
    if s3.access_key_id is None and s3.secret_access_key is None:
        # From one place, all three: a session token fits its own keys only.
        s3 = replace(
            s3,
            access_key_id=secret("AWS_ACCESS_KEY_ID"),
            secret_access_key=secret("AWS_SECRET_ACCESS_KEY"),
            session_token=first(s3.session_token, secret("AWS_SESSION_TOKEN")),
        )
    return replace(
        config,
        hub=replace(
            config.hub,
            endpoint=first(config.hub.endpoint, text("HF_ENDPOINT")),
            token=first(config.hub.token, secret("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")),
        ),
        s3=replace(
            s3,
            endpoint=first(s3.endpoint, text(*S3_ENDPOINT_NAMES)),
            region=first(s3.region, text("AWS_REGION", "AWS_DEFAULT_REGION")),
            default_bucket=first(s3.default_bucket, text("PREDIBASE_MODEL_BUCKET")),
        ),
        gcs=replace(
            config.gcs,
            credentials_path=first(
                config.gcs.credentials_path, text("GOOGLE_APPLICATION_CREDENTIALS")
            ),
        ),
        azure=replace(
            azure,
            account_name=first(azure.account_name, text("AZURE_STORAGE_ACCOUNT_NAME")),
            account_key=first(azure.account_key, secret("AZURE_STORAGE_ACCOUNT_KEY")),
            sas_token=first(azure.sas_token, secret("AZURE_STORAGE_SAS_TOKEN")),
        ),
    )


def first(given: T | None, found: T | None) -> T | None:
    return found if given is None else given
