"""`penstock store`: what people see of stored pages, in a folder here; servers are in `make sweep`."""
from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.memory.stores.files import Files
from penstock.memory.stores.objects import HEADER

KEYS = [os.urandom(16) for _ in range(6)]
EACH = 256 + HEADER.size


@pytest.fixture
def url(tmp_path) -> str:
    store = Files(tmp_path / "store", "f" * 32, [256], words={"weights": "those"})
    list(store.put(KEYS, 0, [memoryview(os.urandom(256)) for _ in KEYS]))
    return f"file://{tmp_path}/store"


def of(url: str, what: str, *more: str) -> int:
    return main(["store", what, url, *more])


def test_what_there_is_is_listed_by_kind_and_swept_and_purged_on_request(url, capsys):
    assert of(url, "ls") == 0
    told = capsys.readouterr().out
    assert f"{'f' * 32}  6 objects, {6 * EACH} bytes" in told and "weights: 'those'" in told
    assert of(url, "sweep", "--bytes", str(4 * EACH)) == 0
    assert f"{3 * EACH} bytes removed, {3 * EACH} left" in capsys.readouterr().out
    assert of(url, "purge") == 2 and "add --yes" in capsys.readouterr().err
    assert of(url, "purge", "--yes") == 0 and of(url, "ls") == 0
    assert "\n0 objects, 0 bytes" in capsys.readouterr().out


def test_who_writes_after_a_purge_says_again_what_is_there(tmp_path, capsys):
    store = Files(tmp_path / "store", "f" * 32, [256], words={"weights": "those"})
    pages = [memoryview(os.urandom(256)) for _ in KEYS]
    assert all(store.put(KEYS, 0, pages))
    assert of(f"file://{tmp_path}/store", "purge", "--yes") == 0
    assert all(store.put(KEYS, 0, pages)) and of(f"file://{tmp_path}/store", "ls") == 0
    assert "6 objects" in (told := capsys.readouterr().out) and "weights: 'those'" in told


def test_damage_is_told_and_removed_on_request(url, capsys):
    path = next(Path(url.removeprefix("file://")).rglob("*.0"))
    path.write_bytes(b"x" * EACH)
    assert of(url, "verify") == 1 and path.exists()
    told = capsys.readouterr()
    assert "5 objects are intact, 1 are damaged" in told.out and path.name in told.err
    assert of(url, "verify", "--delete") == 1 and not path.exists()
    assert of(url, "verify") == 0


@pytest.mark.parametrize(("line", "said"), [
    (["ls", "http://here"], "one of these is needed"), (["ls", "file:///does/not/exist"], "No such file"),
    (["ls", "valkey://me:secret@127.0.0.1:1"], "valkey://...@127.0.0.1:1"),
    (["ls", "redis:me:secret@here"], "redis:...@here"), (["ls", "me:sec\nsecret@here"], "me:...@here"),
    (["ls", "rediss://:?secret@here"], "rediss://...@here"),
    (["ls", "redis://here?password=secret"], "redis://here?..."),
    (["ls", "file:///a", "--yes"], "of penstock store purge"),
    (["sweep", "file:///a", "--bytes", "many"], "many")])
def test_what_is_wrong_is_told_in_words_without_a_password(line, said, capsys):
    pytest.importorskip("redis")
    assert main(["store", *line]) == 2
    told = capsys.readouterr().err
    assert said in told and "secret" not in told and told.startswith("penstock: error: ")
