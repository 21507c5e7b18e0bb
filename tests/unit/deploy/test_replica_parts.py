"""Parts of a replica: its place on the machine, its settings file, what it loads first."""

from __future__ import annotations

import socket
import threading
import tomllib
from pathlib import Path

import pytest

from loramux.config.file import load_serve_config
from loramux.deploy.member_table import Member, MemberTable
from loramux.deploy.prewarm import busiest_adapters, own_adapters
from loramux.deploy.replica import toml
from loramux.deploy.slots import take_slot
from tests.s3_server import free_ports

HOST = "127.0.0.1"


def test_a_successor_takes_the_place_of_a_replica_that_failed(tmp_path: Path) -> None:
    port = min(free_ports(1)[0], 60_000)
    first, second, third = (take_slot(HOST, port, root=tmp_path) for _ in range(3))
    assert len({one.folder for one in (first, second, third)}) == 3
    assert first.port < second.port < third.port
    for slot in (first, second, third):
        slot.keep()
    # The first stops in order, the last one fails: its lock goes with its process.
    first.free()
    third.release()
    successor = take_slot(HOST, port, root=tmp_path)
    assert (successor.port, successor.folder) == (third.port, third.folder)
    fourth = take_slot(HOST, port, root=tmp_path)
    assert fourth.port == first.port
    for slot in (second, successor, fourth):
        slot.free()


def test_a_replica_that_was_never_ready_needs_no_successor(tmp_path: Path) -> None:
    port = min(free_ports(1)[0], 60_000)
    ready, broken, failed = (take_slot(HOST, port, root=tmp_path) for _ in range(3))
    ready.keep()
    failed.keep()
    for slot in (broken, failed):
        slot.release()
    successor = take_slot(HOST, port, root=tmp_path)
    assert successor.port == failed.port
    # It fails as well, while it starts.
    successor.release()
    again = take_slot(HOST, port, root=tmp_path)
    assert again.port == failed.port
    for slot in (ready, again):
        slot.free()


def test_a_successor_waits_for_the_end_of_the_server_of_its_place(tmp_path: Path) -> None:
    port = min(free_ports(1)[0], 60_000)
    first, second = (take_slot(HOST, port, root=tmp_path) for _ in range(2))
    second.keep()
    with socket.socket() as server:
        server.bind((HOST, second.port))
        server.listen()
        second.release()
        ending = threading.Timer(0.5, server.close)
        ending.start()
        successor = take_slot(HOST, first.port, root=tmp_path)
        ending.join()
    assert successor.port == second.port
    first.free()
    successor.free()


def test_a_port_of_another_program_is_left_out(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        taken = other.getsockname()[1]
        slot = take_slot(HOST, taken, root=tmp_path)
        assert slot.port != taken
        slot.free()


def test_settings_survive_the_file(tmp_path: Path) -> None:
    settings = {
        "served_model_name": ["a", 'b"\\'],
        "model": "/models/ü \x7f\n",
        "drain_s": 2.5,
        "port": 8100,
        "no_ui": True,
        "lora_modules": {"team/one": "/a", "two three": "hf:x/y"},
    }
    text = toml(settings)
    assert tomllib.loads(text) == settings
    file = tmp_path / "serve.toml"
    file.write_text(text)
    config = load_serve_config({}, file)
    assert config.port == 8100 and not config.ui
    assert [one.name for one in config.lora_modules] == ["team/one", "two three"]


def entry(name: str, requests: int, cid: str | None = "given") -> dict[str, object]:
    digest = f"cidv1:sha256:{hash(name) & 0xFFFFFFFFFFFF:064x}"
    return {
        "id": name,
        "names": [name],
        "cid": digest if cid else None,
        "requests": requests,
    }


def test_the_busiest_come_first_and_unused_ones_not_at_all() -> None:
    listed = [entry("a", 1), entry("b", 9), entry("c", 0), entry("d", 5), entry("e", 7, None)]
    assert [name for name, _ in busiest_adapters(listed, 2)] == ["b", "d"]


def test_replicas_share_the_busiest_without_overlap() -> None:
    adapters = [(f"n{i}", f"cidv1:sha256:{i * 7919:064x}"[:77]) for i in range(1, 60)]
    adapters = [(name, f"cidv1:sha256:{i * 2654435761 % 2**64:016x}") for i, (name, _) in
                enumerate(adapters, 1)]  # fmt: skip
    urls = [f"http://{HOST}:{8100 + i}" for i in range(3)]
    shares = [own_adapters(adapters, own=url, members=urls) for url in urls]
    assert sorted(sum(shares, [])) == sorted(name for name, _ in adapters)
    assert all(shares)
    # The first replica of a build gets all.
    assert own_adapters(adapters, own=urls[0], members=[]) == [name for name, _ in adapters]


def test_a_replica_that_ray_no_longer_names_is_remembered_until_it_is_forgotten() -> None:
    table = MemberTable()
    one, two = Member("http://h:1", "x"), Member("http://h:2", "x")
    table.replace({"r1": one, "r2": two})
    version = table.version
    table.replace({"r1": one, "r2": two})
    assert table.version == version
    table.replace({"r2": two})
    assert table.version > version
    assert set(table.running()) == {two.url} and set(table.gone()) == {one.url}
    # A change is over, or a successor has its place.
    table.replace({"r2": two, "r3": one})
    assert not table.gone() and set(table.running()) == {one.url, two.url}
    table.died("r2")
    assert set(table.gone()) == {two.url}
    table.forget(two.url)
    assert not table.gone()


@pytest.mark.parametrize("unknown", ["r9"])
def test_the_end_of_an_unknown_replica_is_no_change(unknown: str) -> None:
    table = MemberTable()
    table.died(unknown)
    assert table.version == 0
