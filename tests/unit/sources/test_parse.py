from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loramux.errors import LoramuxError, SourceForbidden, SourceNotFound, SourceRefused
from loramux.sources.config import HttpConfig, HubConfig, S3Config, SourceConfig
from loramux.sources.parse import lasting_name, parse_bucket_url, parse_source
from loramux.sources.source_id import SourceId, SourceKind

CONFIG = SourceConfig(http=HttpConfig(allowed_hosts=("example.com", "*.cdn.org", "host:8080")))
NAME = st.from_regex(r"[A-Za-z0-9](?:[A-Za-z0-9_]{0,10}[A-Za-z0-9])?", fullmatch=True)
SEGMENT = st.text(
    st.characters(categories=("L", "N", "P", "S"), exclude_characters="/\\:@?#%"), min_size=1
).filter(lambda text: text not in (".", "..") and len(text) < 40 and "." not in text)


@pytest.mark.parametrize(
    ("text", "place", "revision", "folder", "weights_name"),
    [
        ("hf:acme/pirate", "acme/pirate", None, (), None),
        ("hf://acme/pirate", "acme/pirate", None, (), None),
        ("hf:acme/pirate@v1.0", "acme/pirate", "v1.0", (), None),
        ("hf:acme/pirate@refs/pr/3", "acme/pirate", "refs/pr/3", (), None),
        ("hf:a/b@main:x.safetensors", "a/b", "main", (), "x.safetensors"),
        ("hf:a/b:checkpoint-5", "a/b", None, ("checkpoint-5",), None),
        ("hf:a/b:c/d.safetensors", "a/b", None, ("c",), "d.safetensors"),
    ],
)
def test_forms_of_the_hub(
    text: str,
    place: str,
    revision: str | None,
    folder: tuple[str, ...],
    weights_name: str | None,
) -> None:
    assert parse_source(text, CONFIG) == SourceId(
        kind=SourceKind.HUB,
        place=place,
        revision=revision,
        folder=folder,
        weights_name=weights_name,
    )


@pytest.mark.parametrize(
    "text",
    ["hf:", "hf:pirate", "hf:a/b/c", "hf:../b", "hf:a/..", "hf:a/b@", "hf:a/b@..", "hf:a/b@a..b"]
    + ["hf:a/b:", "hf:a/b:../x", "hf:a/b:/etc/passwd", "hf:a/b:x//y", "hf:a/b@-x", "hf:-a/b"]
    + ["hf:a/b.git", "hf:a--b/c", "hf:a/b@x y", "hf:a/b?x=1", "hf:a/b@a//b", "hf:a/" + "b" * 97]
    + ["hf:a/b@x.lock", "hf:a/b%2e%2e", "hf:a/b\n", "hf:a/b\0", "hf:a/b\u202e", "hf:а/b"]
    + ["s3://", "s3://B/x", "s3://ab/x", "s3://a..b/x", "s3://bucket/../x"]
    + ["s3://bucket//x", "s3://user@bucket/x", "s3://bucket/x\\y", "s3://" + "b" * 64 + "/x"]
    + ["gs://_ab/x", "az://a--b/x", "az://a_b/x", "", "x" * 3000]
    + ["http://", "https:///x", "https://example.com/../x", "https://example.com/%2e%2e/x"]
    + ["https://example.com/a%2fb", "https://example.com/a%5cb", "https://example.com/%00"]
    + ["https://u:p@example.com/x", "https://example.com@evil.org/x", "https://example.com/x?y=1"]
    + ["https://example.com/x#y", "https://example.com\\@evil.org/", "https://exa mple.com/"]
    + ["https://example.com:x/", "https://example.com:99999/", "https://exämple.com/"]
    + ["https://2130706433/x", "https://0x7f000001/x", "https://127.1/x", "https://0177.0.0.1/x"]
    + ["https://[::1%25eth0]/x", "https://[::1/x", "https://example.com./x", "https://.com/x"],
)
def test_ids_of_a_wrong_form_are_refused(text: str) -> None:
    with pytest.raises(SourceRefused) as refused:
        parse_source(text, CONFIG)
    assert refused.value.code == "bad_form"


@pytest.mark.parametrize("text", ["ftp://example.com/x", "file:///etc/passwd", "gopher://x/y"])
def test_other_schemes_are_not_known(text: str) -> None:
    with pytest.raises(SourceRefused, match="not a supported scheme") as refused:
        parse_source(text, CONFIG)
    assert refused.value.code == "unknown_source"


@pytest.mark.parametrize(
    ("text", "kind", "place", "folder"),
    [
        ("s3://bucket/a/b/", SourceKind.S3, "bucket", ("a", "b")),
        ("S3://bucket", SourceKind.S3, "bucket", ()),
        ("gs://my_bucket/a", SourceKind.GCS, "my_bucket", ("a",)),
        ("az://container/a", SourceKind.AZURE, "container", ("a",)),
        ("https://example.com/a%20b/", SourceKind.HTTP, "https://example.com", ("a b",)),
        ("HTTPS://EXAMPLE.com:443/a", SourceKind.HTTP, "https://example.com", ("a",)),
        ("http://host:8080", SourceKind.HTTP, "http://host:8080", ()),
        ("http://a.b.cdn.org/x", SourceKind.HTTP, "http://a.b.cdn.org", ("x",)),
    ],
)
def test_forms_of_buckets_and_web_servers(
    text: str, kind: SourceKind, place: str, folder: tuple[str, ...]
) -> None:
    assert parse_source(text, CONFIG) == SourceId(kind=kind, place=place, folder=folder)


@pytest.mark.parametrize(
    "text",
    ["https://evil.org/x", "https://example.com.evil.org/x", "https://example.com:8443/x"]
    + ["http://169.254.169.254/latest/meta-data", "http://127.0.0.1/x", "http://[::1]/x"]
    + ["http://localhost/x", "http://host/x"],
)
def test_hosts_that_are_not_on_the_list_are_refused(text: str) -> None:
    with pytest.raises(SourceForbidden, match="not on the list") as refused:
        parse_source(text, CONFIG)
    assert refused.value.code == "not_allowed"


def test_owners_and_buckets_may_be_listed() -> None:
    config = replace(
        CONFIG,
        hub=HubConfig(allowed_owners=("acme",)),
        s3=S3Config(allowed_buckets=("mine",)),
    )
    parse_source("hf:acme/x", config)
    parse_source("s3://mine/x", config)
    for text in ("hf:other/x", "s3://yours/x"):
        with pytest.raises(SourceForbidden, match="not allowed on this server"):
            parse_source(text, config)


def test_a_disabled_kind_is_refused() -> None:
    config = replace(CONFIG, enabled=(SourceKind.S3,))
    with pytest.raises(SourceForbidden, match="turned off") as refused:
        parse_source("hf:acme/x", config)
    assert refused.value.code == "not_enabled"


def test_local_paths_stay_under_their_root(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "pirate").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (root / "leak").symlink_to(tmp_path / "outside")
    (root / "file").write_text("x")
    config = SourceConfig(allowed_roots=(root,))
    source = parse_source("pirate", config)
    assert source == SourceId(kind=SourceKind.LOCAL, place=str(root), folder=("pirate",))
    assert parse_source(f"{root}/pirate/", config) == source
    assert parse_source(str(source), config) == source
    for text in ("leak", str(tmp_path / "outside"), "/etc"):
        with pytest.raises(SourceForbidden):
            parse_source(text, config)
    for text in ("../outside", f"{root}/../outside", "pirate/../../outside", "./pirate"):
        with pytest.raises(SourceRefused, match="lead outside"):
            parse_source(text, config)
    for text in ("missing", "file"):
        with pytest.raises(SourceNotFound):
            parse_source(text, config)


def test_names_of_lorax(tmp_path: Path) -> None:
    (tmp_path / "pirate").mkdir()
    config = SourceConfig(allowed_roots=(tmp_path,))
    hub = parse_source("acme/pirate@v1", config, adapter_source="hub")
    assert str(hub) == "hf:acme/pirate@v1"
    local = parse_source("pirate", config, adapter_source="local")
    assert local.kind is SourceKind.LOCAL
    assert str(parse_source("s3://b-1/x", config, adapter_source="s3")) == "s3://b-1/x"
    assert str(parse_source("bucket/x", config, adapter_source="s3")) == "s3://bucket/x"
    own = replace(config, s3=S3Config(default_bucket="own-bucket"))
    assert str(parse_source("a/x", own, adapter_source="s3")) == "s3://own-bucket/a/x"


def test_the_form_is_checked_against_the_named_source() -> None:
    for text, source in [("s3://b/x", "hub"), ("http://x/y", "s3"), ("a/b/c", "pbase")]:
        with pytest.raises(SourceRefused) as refused:
            parse_source(text, CONFIG, adapter_source=source)
        assert refused.value.code == "bad_form"
    with pytest.raises(SourceRefused, match="'gcs' is not a source"):
        parse_source("a/b", CONFIG, adapter_source="gcs")


def test_predibase_is_refused_unless_a_mirror_is_configured() -> None:
    with pytest.raises(SourceRefused, match="not served here.*configure the URL"):
        parse_source("news/3", CONFIG, adapter_source="pbase")
    http = replace(CONFIG.http, pbase_url="https://example.com/mirror/")
    mirrored = replace(CONFIG, http=http)
    source = parse_source("news/3", mirrored, adapter_source="pbase")
    assert str(source) == "https://example.com/mirror/news/3"


def test_the_servers_own_bucket_need_not_be_listed_but_must_be_one() -> None:
    assert parse_bucket_url("gs://mine/x").folder == ("x",)
    for text in ("mine/x", "hf:a/b", "http://x/y", "s3://"):
        with pytest.raises(SourceRefused):
            parse_bucket_url(text)


@given(text=st.text(max_size=60))
def test_any_text_gives_an_id_or_a_refusal(text: str) -> None:
    for prefix in ("", "hf:", "s3://", "https://", "https://example.com/"):
        for adapter_source in (None, "hub", "s3", "local"):
            try:
                source = parse_source(prefix + text, CONFIG, adapter_source=adapter_source)
            except LoramuxError as error:
                str(error).encode()
                continue
            assert not set(source.segments) & {"", ".", ".."}
            assert not any("/" in part or "\0" in part for part in source.segments)


@given(
    owner=NAME,
    name=NAME,
    revision=st.none() | NAME,
    folder=st.lists(SEGMENT, max_size=3),
    weights=st.none() | NAME,
)
def test_an_id_reads_back_from_its_text(
    owner: str, name: str, revision: str | None, folder: list[str], weights: str | None
) -> None:
    path = "/".join([*folder, *([f"{weights}.safetensors"] if weights else [])])
    at = f"@{revision}" if revision else ""
    hub = f"hf:{owner}/{name}{at}" + (f":{path}" if path else "")
    for text in (hub, f"s3://bucket/{path}", f"https://example.com/{path}"):
        source = parse_source(text, CONFIG)
        assert parse_source(str(source), CONFIG) == source
        assert source.folder == tuple(folder)


@pytest.mark.parametrize(
    "text", ["hf:owner/name@main:sub", "s3://bucket/a/b", "https://example.com/a%20b"]
)
def test_the_lasting_name_of_a_source_means_the_same_source(text: str, tmp_path: Path) -> None:
    config = SourceConfig(http=HttpConfig(allowed_hosts=("example.com",)))
    name = lasting_name(text, tmp_path, config)
    assert parse_source(name, config) == parse_source(text, config)


def test_the_lasting_name_of_a_folder_is_its_whole_path(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "a").mkdir()
    assert lasting_name("link", tmp_path / "link", SourceConfig()) == str(tmp_path / "a")
