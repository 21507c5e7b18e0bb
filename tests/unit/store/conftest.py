"""Fixtures of S3 servers, shared with the tests of sources."""

from __future__ import annotations

from tests.unit.sources.conftest import s3_config as s3_config
from tests.unit.sources.conftest import s3_proxy as s3_proxy
from tests.unit.sources.conftest import s3_proxy_config as s3_proxy_config
