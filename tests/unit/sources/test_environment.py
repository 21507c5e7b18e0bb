from __future__ import annotations

from loramux.sources.config import HubConfig, S3Config, Secret, SourceConfig, read_environment

ENVIRONMENT = {
    "HF_ENDPOINT": "http://hub",
    "HF_TOKEN": "hf_token",
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_SESSION_TOKEN": "session",
    "AWS_DEFAULT_REGION": "eu-central-1",
    "AWS_ENDPOINT_URL": "http://all",
    "AWS_ENDPOINT_URL_S3": "http://s3",
    "GOOGLE_APPLICATION_CREDENTIALS": "/key.json",
    "AZURE_STORAGE_ACCOUNT_NAME": "account",
    "AZURE_STORAGE_ACCOUNT_KEY": "azure-key",
    "AZURE_STORAGE_SAS_TOKEN": "",
    "PREDIBASE_MODEL_BUCKET": "models",
}


def test_the_usual_variables_fill_the_gaps() -> None:
    config = read_environment(ENVIRONMENT, SourceConfig())
    assert config.hub == HubConfig(endpoint="http://hub", token=Secret("hf_token"))
    assert config.s3 == S3Config(
        endpoint="http://s3",
        region="eu-central-1",
        access_key_id=Secret("key"),
        secret_access_key=Secret("secret"),
        session_token=Secret("session"),
        default_bucket="models",
    )
    assert config.gcs.credentials_path == "/key.json"
    assert (config.azure.account_name, config.azure.account_key) == (
        "account",
        Secret("azure-key"),
    )
    assert config.azure.sas_token is None, "an empty variable is not a credential"


def test_what_the_config_says_stays_and_keys_are_not_mixed() -> None:
    given = S3Config(access_key_id=Secret("mine"), secret_access_key=Secret("own"), region="r")
    config = read_environment(ENVIRONMENT, SourceConfig(s3=given))
    assert config.s3.access_key_id == Secret("mine")
    assert config.s3.session_token is None
    assert config.s3.region == "r"


def test_an_empty_environment_changes_nothing() -> None:
    assert read_environment({}, SourceConfig()) == SourceConfig()
