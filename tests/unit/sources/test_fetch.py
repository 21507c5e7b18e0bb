"""Fetches of complete adapters: limits, resumption, checks and temporary folders."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from loramux.adapters.images.files import DIFFUSERS_NAME
from loramux.errors import InvalidRequest, SourceFailed, SourceNotFound, SourceRefused
from loramux.sources.config import FetchLimits, SourceConfig
from loramux.sources.download import Progress
from loramux.sources.fetch import ABANDONED_S, Fetcher, fetched, held, sweep
from loramux.sources.parse import parse_source
from tests.fault_server import Answer, Fault, FaultServer
from tests.unit.sources.source_factory import (
    CONFIG,
    CONFIG_NAME,
    FAST,
    WEIGHTS,
    WEIGHTS_NAME,
    FakeTime,
    adapter_files,
    entries,
    make_weights,
)

PARTIAL = ".target.partial"
PROGRAM = """
from pathlib import Path
from loramux.sources.config import FetchLimits, HttpConfig, SourceConfig
from loramux.sources.fetch import Fetcher
from loramux.sources.parse import parse_source
limits = FetchLimits(part_bytes=4096, num_workers=1)
config = SourceConfig(http=HttpConfig(private_hosts=("{host}",)), limits=limits)
Fetcher(config).fetch(parse_source("{url}", config), Path("{folder}"))
"""


def fetch(config: SourceConfig, url: str, tmp_path: Path, time: FakeTime | None = None) -> Path:
    fetcher = Fetcher(config, timing=(time or FakeTime()).timing)
    return fetcher.fetch(parse_source(url, config), tmp_path / "target").folder


def test_only_the_two_files_of_an_adapter_come_with_their_digests(
    web: FaultServer, web_config: SourceConfig, tmp_path: Path
) -> None:
    web.files["pirate/README.md"] = b"# nice"
    source = parse_source(f"{web.url}/pirate", web_config)
    fetched = Fetcher(web_config).fetch(source, tmp_path / "target")
    assert entries(tmp_path) == ["target", f"target/{CONFIG_NAME}", f"target/{WEIGHTS_NAME}"]
    assert (tmp_path / "target" / WEIGHTS_NAME).read_bytes() == WEIGHTS
    assert fetched.files == (CONFIG_NAME, WEIGHTS_NAME)
    assert fetched.digests[WEIGHTS_NAME] == hashlib.sha256(WEIGHTS).hexdigest()
    assert fetched.size_bytes == len(CONFIG) + len(WEIGHTS)
    assert fetched.revision is not None


def test_a_single_file_without_a_config_is_saved_as_one_of_an_image_model(
    web: FaultServer, web_config: SourceConfig, tmp_path: Path
) -> None:
    web.files = {"styles/watercolour.safetensors": WEIGHTS}
    folder = fetch(web_config, f"{web.url}/styles/watercolour.safetensors", tmp_path)
    assert entries(folder) == [DIFFUSERS_NAME]


def test_a_folder_that_is_there_is_not_touched(
    web: FaultServer, web_config: SourceConfig, tmp_path: Path
) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "mine").write_text("keep")
    with pytest.raises(InvalidRequest, match="new folder"):
        fetch(web_config, f"{web.url}/pirate", tmp_path)
    assert entries(tmp_path) == ["target", "target/mine"]
    assert web.requests("GET") == []


def test_a_second_try_goes_on_where_the_first_broke_off(
    web: FaultServer, web_config: SourceConfig, tmp_path: Path
) -> None:
    config = replace(web_config, limits=replace(FAST, max_attempts=1, part_bytes=10**6))
    web.faults.append(Fault(path_end=WEIGHTS_NAME, cut_at=6000))
    with pytest.raises(SourceFailed) as failed:
        fetch(config, f"{web.url}/pirate", tmp_path)
    assert failed.value.is_temporary
    assert not (tmp_path / "target").exists()
    assert PARTIAL in entries(tmp_path)
    folder = fetch(config, f"{web.url}/pirate", tmp_path)
    assert (folder / WEIGHTS_NAME).read_bytes() == WEIGHTS
    assert entries(tmp_path) == ["target", f"target/{CONFIG_NAME}", f"target/{WEIGHTS_NAME}"]
    ranges = [seen.headers.get("range") for seen in web.requests("GET", WEIGHTS_NAME)]
    assert ranges == [None, f"bytes=6000-{len(WEIGHTS) - 1}"]


def test_a_source_that_changed_between_attempts_is_fetched_again(
    web: FaultServer, web_config: SourceConfig, tmp_path: Path
) -> None:
    config = replace(web_config, limits=replace(FAST, max_attempts=1, part_bytes=10**6))
    web.faults.append(Fault(path_end=WEIGHTS_NAME, cut_at=6000))
    with pytest.raises(SourceFailed):
        fetch(config, f"{web.url}/pirate", tmp_path)
    other = make_weights(seed=1)
    web.files.update(adapter_files("pirate", other))
    folder = fetch(config, f"{web.url}/pirate", tmp_path)
    assert (folder / WEIGHTS_NAME).read_bytes() == other


def test_a_source_that_changes_during_a_fetch_is_fetched_again(
    web: FaultServer, web_config: SourceConfig, tmp_path: Path
) -> None:
    other = make_weights(seed=1)
    received: list[Progress] = []

    def swap(progress: Progress) -> None:
        received.append(progress)
        if progress.received_bytes > 3000:
            web.files.update(adapter_files("pirate", other))

    fetcher = Fetcher(web_config, timing=FakeTime().timing)
    source = parse_source(f"{web.url}/pirate", web_config)
    fetched = fetcher.fetch(source, tmp_path / "target", progress=swap)
    assert (fetched.folder / WEIGHTS_NAME).read_bytes() == other


def test_progress_counts_every_byte_once(
    web: FaultServer, web_config: SourceConfig, tmp_path: Path
) -> None:
    received: list[Progress] = []
    source = parse_source(f"{web.url}/pirate", web_config)
    Fetcher(web_config).fetch(source, tmp_path / "target", progress=received.append)
    total_bytes = len(CONFIG) + len(WEIGHTS)
    assert received[-1] == Progress(total_bytes, total_bytes)
    counts = [progress.received_bytes for progress in received]
    assert counts == sorted(counts)


def test_a_caller_that_gives_up_ends_the_fetch_and_may_go_on_later(
    web: FaultServer, web_config: SourceConfig, tmp_path: Path
) -> None:
    class GoneAway(Exception):
        pass

    def leave(progress: Progress) -> None:
        if progress.received_bytes > 3000:
            raise GoneAway

    fetcher = Fetcher(web_config)
    source = parse_source(f"{web.url}/pirate", web_config)
    with pytest.raises(GoneAway):
        fetcher.fetch(source, tmp_path / "target", progress=leave)
    assert not (tmp_path / "target").exists()
    num_before = len(web.requests("GET", CONFIG_NAME))
    fetcher.fetch(source, tmp_path / "target")
    assert len(web.requests("GET", CONFIG_NAME)) == num_before, "the config had come already"


def test_a_wrong_expected_digest_leaves_nothing(
    web: FaultServer, web_config: SourceConfig, tmp_path: Path
) -> None:
    source = parse_source(f"{web.url}/pirate", web_config)
    with pytest.raises(SourceFailed, match="expected") as failed:
        Fetcher(web_config).fetch(
            source, tmp_path / "target", expected_sha256={WEIGHTS_NAME: "0" * 64}
        )
    assert not failed.value.is_temporary
    assert entries(tmp_path) == []


def test_the_right_expected_digest_passes_and_one_for_no_file_does_not(
    web: FaultServer, web_config: SourceConfig, tmp_path: Path
) -> None:
    source = parse_source(f"{web.url}/pirate", web_config)
    right = {WEIGHTS_NAME: hashlib.sha256(WEIGHTS).hexdigest()}
    Fetcher(web_config).fetch(source, tmp_path / "one", expected_sha256=right)
    with pytest.raises(SourceNotFound, match="other.safetensors"):
        Fetcher(web_config).fetch(
            source, tmp_path / "two", expected_sha256={"other.safetensors": "0" * 64}
        )


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({"x-amz-checksum-sha256": "A" * 43 + "="}, "sha256"),
        ({"Repr-Digest": f"sha-256=:{'A' * 43}=:"}, "sha256"),
        ({"Content-MD5": "A" * 22 + "=="}, "md5"),
    ],
)
def test_content_that_does_not_match_the_servers_checksum_is_discarded(
    web: FaultServer,
    web_config: SourceConfig,
    tmp_path: Path,
    headers: dict[str, str],
    said: str,
) -> None:
    web.faults.append(Fault(method="HEAD", path_end=WEIGHTS_NAME, headers=headers))
    with pytest.raises(SourceFailed, match=rf"source reports \({said}\)"):
        fetch(web_config, f"{web.url}/pirate", tmp_path)
    assert entries(tmp_path) == []


def test_ten_gigabytes_are_refused_before_a_byte_is_fetched(
    web: FaultServer, web_config: SourceConfig, tmp_path: Path
) -> None:
    size = {"Content-Length": str(10 * 10**9)}
    web.faults.append(Fault(method="HEAD", path_end=WEIGHTS_NAME, headers=size))
    with pytest.raises(SourceRefused) as refused:
        fetch(web_config, f"{web.url}/pirate", tmp_path)
    assert refused.value.code == "too_large"
    assert web.requests("GET") == []
    assert entries(tmp_path) == []


def test_a_server_that_says_no_size_is_cut_off_at_the_limit(
    web: FaultServer, web_config: SourceConfig, tmp_path: Path
) -> None:
    limits = FetchLimits(max_file_bytes=5000)
    no_size = {"Content-Length": "", "Accept-Ranges": ""}
    web.faults.append(Fault(method="HEAD", path_end=WEIGHTS_NAME, headers=no_size))
    web.faults.append(Fault(method="GET", path_end=WEIGHTS_NAME, headers=no_size))
    seen_bytes: list[int] = []

    def measure(_: Progress) -> None:
        seen_bytes.extend(path.stat().st_size for path in tmp_path.rglob(WEIGHTS_NAME))

    source = parse_source(f"{web.url}/pirate", web_config)
    with pytest.raises(SourceRefused) as refused:
        Fetcher(web_config).fetch(source, tmp_path / "target", limits=limits, progress=measure)
    assert refused.value.code == "too_large"
    assert max(seen_bytes, default=0) <= 5000
    assert entries(tmp_path) == []


def test_files_that_fit_alone_but_not_together_are_refused(
    web: FaultServer, web_config: SourceConfig, tmp_path: Path
) -> None:
    limits = FetchLimits(max_total_bytes=len(WEIGHTS))
    source = parse_source(f"{web.url}/pirate", web_config)
    with pytest.raises(SourceRefused, match="The adapter has"):
        Fetcher(web_config).fetch(source, tmp_path / "target", limits=limits)
    assert entries(tmp_path) == []


def test_a_missing_config_or_a_pickle_is_named(
    web: FaultServer, web_config: SourceConfig, tmp_path: Path
) -> None:
    web.files = {
        f"bare/{WEIGHTS_NAME}": WEIGHTS,
        f"old/{CONFIG_NAME}": CONFIG,
        "old/adapter_model.bin": b"\x80\x02",
    }
    with pytest.raises(SourceNotFound, match=CONFIG_NAME):
        fetch(web_config, f"{web.url}/bare", tmp_path)
    with pytest.raises(SourceRefused, match="can run code") as refused:
        fetch(web_config, f"{web.url}/old", tmp_path)
    assert refused.value.code == "pickle"
    with pytest.raises(SourceNotFound, match=WEIGHTS_NAME):
        fetch(web_config, f"{web.url}/nothing", tmp_path)
    assert entries(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"PK\x03\x04" + b"x" * 9000, "archive"),
        (b"\x1f\x8b" + b"x" * 9000, "archive"),
        (b"\x80\x02" + b"x" * 9000, "pickle"),
        ((10 * 10**9).to_bytes(8, "little") + b"{" + b"x" * 9000, "oversized_header"),
        (b"<html>" + b"x" * 9000, "not_an_adapter"),
        (b"version https://git-lfs.github.com/spec/v1\n" + b"x" * 90, "lfs_pointer"),
        (b"", "not_an_adapter"),
    ],
)
def test_what_is_not_safetensors_is_refused_by_its_first_bytes(
    web: FaultServer, web_config: SourceConfig, tmp_path: Path, content: bytes, code: str
) -> None:
    web.files[f"pirate/{WEIGHTS_NAME}"] = content
    with pytest.raises(SourceRefused) as refused:
        fetch(web_config, f"{web.url}/pirate", tmp_path)
    assert refused.value.code == code
    assert len(web.requests("GET", WEIGHTS_NAME)) <= 1, "the rest was fetched all the same"
    assert entries(tmp_path) == []


def test_failures_are_waited_out_longer_each_time(
    web: FaultServer, web_config: SourceConfig, tmp_path: Path
) -> None:
    web.faults += [Fault(path_end=CONFIG_NAME, answer=Answer(status=500))] * 2
    time = FakeTime()
    fetch(web_config, f"{web.url}/pirate", tmp_path, time)
    assert time.sleeps_s == [0.375, 0.75]


def test_a_source_that_stays_broken_is_given_up_and_leaves_nothing(
    web: FaultServer, web_config: SourceConfig, tmp_path: Path
) -> None:
    web.faults += [Fault(method="HEAD", answer=Answer(status=503))] * 9
    with pytest.raises(SourceFailed, match="status 503") as failed:
        fetch(web_config, f"{web.url}/pirate", tmp_path)
    assert failed.value.is_temporary
    assert len(web.requests("HEAD")) == FAST.max_attempts
    assert entries(tmp_path) == []


def test_a_body_that_drips_forever_ends_at_the_time_limit(
    web: FaultServer, web_config: SourceConfig, tmp_path: Path
) -> None:
    # Each reading of the clock takes a second, two for each of many parts.
    limits = replace(FAST, timeout_s=20.0, part_bytes=64)
    time = FakeTime(tick_s=1.0)
    source = parse_source(f"{web.url}/pirate", web_config)
    with pytest.raises(SourceFailed, match="longer than 20 s"):
        Fetcher(web_config, timing=time.timing).fetch(source, tmp_path / "target", limits=limits)
    assert not (tmp_path / "target").exists()


def test_two_fetches_into_one_folder_do_not_meet(
    web: FaultServer, web_config: SourceConfig, tmp_path: Path
) -> None:
    errors: list[SourceFailed] = []
    fetcher = Fetcher(web_config)
    source = parse_source(f"{web.url}/pirate", web_config)

    def fetch_too(_: Progress) -> None:
        with pytest.raises(SourceFailed, match="another process") as failed:
            fetcher.fetch(source, tmp_path / "target")
        errors.append(failed.value)

    fetcher.fetch(source, tmp_path / "target", progress=fetch_too)
    assert errors
    assert (tmp_path / "target" / WEIGHTS_NAME).read_bytes() == WEIGHTS


def test_a_local_folder_is_copied(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "pirate").mkdir(parents=True)
    for name, content in adapter_files().items():
        (root / "pirate" / name).write_bytes(content)
    config = SourceConfig(allowed_roots=(root,))
    fetched = Fetcher(config).fetch(parse_source("pirate", config), tmp_path / "target")
    assert (fetched.folder / WEIGHTS_NAME).read_bytes() == WEIGHTS
    assert fetched.revision is None


def test_a_killed_process_leaves_no_target_and_the_next_one_goes_on(
    web: FaultServer, web_config: SourceConfig, tmp_path: Path
) -> None:
    # The second part gets no reply; the first is on disk by then.
    web.faults += [Fault(path_end=WEIGHTS_NAME), Fault(path_end=WEIGHTS_NAME, is_silent=True)]
    program = PROGRAM.format(url=f"{web.url}/pirate", host=web.host, folder=tmp_path / "target")
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        try:
            assert web.wait_for_silence(60.0)
        finally:
            process.kill()
    assert not (tmp_path / "target").exists()
    num_before = len(web.requests("GET"))
    folder = fetch(web_config, f"{web.url}/pirate", tmp_path)
    assert (folder / WEIGHTS_NAME).read_bytes() == WEIGHTS
    assert entries(tmp_path) == ["target", f"target/{CONFIG_NAME}", f"target/{WEIGHTS_NAME}"]
    ranges = [seen.headers["range"] for seen in web.requests("GET")[num_before:]]
    assert sorted(ranges) == ["bytes=4096-8191", "bytes=8192-10078"]


def test_the_files_are_there_as_long_as_they_are_wanted(
    web: FaultServer, web_config: SourceConfig, tmp_path: Path
) -> None:
    source = parse_source(f"{web.url}/pirate", web_config)
    fetcher = Fetcher(web_config)
    with fetched(fetcher, source, tmp_path) as folder:
        assert (folder / WEIGHTS_NAME).read_bytes() == WEIGHTS
        with fetched(fetcher, source, tmp_path) as other:
            assert other != folder and (other / WEIGHTS_NAME).read_bytes() == WEIGHTS
    assert entries(tmp_path) == []


def test_an_interrupted_fetch_is_resumed(
    web: FaultServer, web_config: SourceConfig, tmp_path: Path
) -> None:
    once = replace(web_config, limits=replace(web_config.limits, max_attempts=1))
    source = parse_source(f"{web.url}/pirate", once)
    fetcher = Fetcher(once, timing=FakeTime().timing)
    web.faults = [Fault(path_end=WEIGHTS_NAME, cut_at=3000)]
    with pytest.raises(SourceFailed), fetched(fetcher, source, tmp_path):
        pass
    assert entries(tmp_path), "nothing was kept"
    seen: list[int] = []
    with fetched(fetcher, source, tmp_path, progress=lambda p: seen.append(p.received_bytes)):
        pass
    assert max(seen) >= len(WEIGHTS) and entries(tmp_path) == []


def test_a_failed_fetch_leaves_no_folder(
    tmp_path: Path, web: FaultServer, web_config: SourceConfig
) -> None:
    source = parse_source(f"{web.url}/nothing-there", web_config)
    with pytest.raises(SourceNotFound), fetched(Fetcher(web_config), source, tmp_path):
        pass
    assert entries(tmp_path) == []


def test_abandoned_downloads_are_swept(tmp_path: Path) -> None:
    old, new, used = (tmp_path / name for name in ("old", "new", "used"))
    for place in (old, new, used):
        place.mkdir()
    for place in (old, used):
        os.utime(place, (0, 0))
    with held(used):
        os.utime(used, (0, 0))
        sweep(tmp_path, older_than=ABANDONED_S)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "used"]
