"""Pages as files: names, the header, what damage and strangers in the folder lead to, quota and secret."""
from __future__ import annotations

import fcntl
import os
import random
import shutil
from pathlib import Path

import pytest

from penstock.config.base.errors import ConfigError
from penstock.config.base.storage_url import StorageUrl
from penstock.config.settings.tree import KVConfig
from penstock.core.kv.prefix_tree import Tree, key_under
from penstock.exec.start.store import check_storage
from penstock.memory.stores import files as files_module
from penstock.memory.stores.files import Files, Folder, open_root
from penstock.memory.stores.objects import HEADER, Verdict
from penstock.memory.stores.secret import secret_of

SIZES = [256, 64]
KEYS = [bytes([i]) * 16 for i in range(40)]
FP = "f" * 32


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path / "store", FP, SIZES, words={"weights": "w"})


def page(seed: int, group: int = 0) -> memoryview:
    return memoryview(bytearray(random.Random(seed).randbytes(SIZES[group])))


def read(files: Files, key: bytes, group: int = 0) -> tuple[Verdict, bytes]:
    into = memoryview(bytearray(SIZES[group]))
    [verdict] = files.get([key], group, [into])
    return verdict, bytes(into)


def put(files: Files, key: bytes, group: int, what: memoryview) -> int:
    [written] = files.put([key], group, [what])
    return written


def present(files: Files, key: bytes) -> int:
    [groups] = files.present([key])
    return groups


def where(files: Files, key: bytes, group: int = 0) -> Path:
    return files.root / "v1" / FP / key[:1].hex() / f"{key[1:].hex()}.{group}"


def test_names_of_pages_are_the_same_in_every_process_for_ever():
    """What was stored by an earlier version is found: these must never change."""
    root = key_under(b"engine", (0,))
    first = key_under(root, tuple(range(16)))
    assert root.hex() == "3d54fdd7e3b303b798132a70b5c4068d"
    assert first.hex() == "98be3c18c2543a3e8467e3fc1938f903"
    assert key_under(first, (5, 6, -(2**63) + 1, -3)).hex() == "98b052841793e014f24150718326baa8"
    tree = Tree([], b"engine")
    node = tree.child(tree.root(0), tuple(range(16)))
    assert tree.digest(node) == first and tree.root_digest(2**63 - 1) != root


def test_what_was_stored_is_read_and_what_was_not_is_gone(files):
    assert put(files, KEYS[1], 0, page(1)) == 256 + HEADER.size
    assert put(files, KEYS[1], 0, page(2)) == 0, "it is there: a name says what it holds"
    put(files, KEYS[1], 1, page(3, 1))
    assert read(files, KEYS[1]) == (Verdict.GOOD, bytes(page(1)))
    assert read(files, KEYS[1], 1) == (Verdict.GOOD, bytes(page(3, 1)))
    assert read(files, KEYS[2])[0] is Verdict.GONE
    assert (present(files, KEYS[1]), present(files, KEYS[2])) == (3, 0)
    files.delete(KEYS[1:2], 0)
    files.delete(KEYS[1:2], 0)
    assert present(files, KEYS[1]) == 2 and read(files, KEYS[1])[0] is Verdict.GONE
    again = Files(files.root, FP, SIZES)            # a restart
    assert read(again, KEYS[1], 1)[0] is Verdict.GOOD
    assert present(Files(files.root, "e" * 32, SIZES), KEYS[1]) == 0, "another kind of engine"


@pytest.mark.parametrize("num", [1000, pytest.param(10_000, marks=pytest.mark.soak)])
def test_a_damaged_object_is_never_good(files, num):
    """Bits, lengths, names, groups, headers of others."""
    dice = random.Random(7)
    for key in KEYS[:20]:
        put(files, key, 0, page(key[0]))
        put(files, key, 1, page(key[0], 1))
    done = 0
    while done < num:
        key, group = dice.choice(KEYS[:20]), dice.randrange(2)
        path = where(files, key, group)
        good = path.read_bytes()
        data = bytearray(good)
        match dice.randrange(7):
            case 0:
                data[dice.randrange(len(data) - 16 if dice.random() < 0.5 else 48)] ^= 1 << dice.randrange(8)
            case 1:
                del data[dice.randrange(len(data)):]
            case 2:
                data += bytes(dice.randint(1, 99))
            case 3:
                other = dice.choice([k for k in KEYS[:20] if k != key])
                data[:] = where(files, other, group).read_bytes()
            case 4:
                data[:] = where(files, key, 1 - group).read_bytes()
            case 5:
                data[:] = bytes(len(data))
            case 6:
                data[dice.randrange(HEADER.size, len(data)):] = b""
                data += bytes(len(good) - len(data) + (data[-1] == 0))
        if data == good:
            continue
        done += 1
        path.write_bytes(data)
        verdict, _ = read(files, key, group)
        assert verdict is Verdict.BAD
        [listed] = [o for o in Folder(files.root).objects() if files.root / o.name == path]
        assert Folder(files.root).examine(listed) is Verdict.BAD
        path.write_bytes(good)
        assert read(files, key, group)[0] is Verdict.GOOD


def test_no_link_is_followed(files, tmp_path):
    put(files, KEYS[1], 0, page(1))
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in (where(files, KEYS[1]), where(files, KEYS[2])):
        shutil.copy(where(files, KEYS[1]), outside / name.name)
    where(files, KEYS[1]).unlink()
    where(files, KEYS[1]).symlink_to(outside / where(files, KEYS[1]).name)
    assert read(files, KEYS[1])[0] is Verdict.BAD and present(files, KEYS[1]) == 0
    where(files, KEYS[2]).parent.symlink_to(outside)
    with pytest.raises(OSError):
        put(files, KEYS[2], 0, page(2))
    assert len(list(outside.iterdir())) == 2
    assert not list(Folder(files.root).objects()), "nor is one listed"
    put(files, KEYS[1], 0, page(1))                   # takes the link's place
    assert read(files, KEYS[1])[0] is Verdict.GOOD


def test_a_folder_that_is_removed_meanwhile_is_made_again(files):
    put(files, KEYS[1], 0, page(1))
    shutil.rmtree(files.root / "v1")
    assert read(files, KEYS[1])[0] is Verdict.GONE and present(files, KEYS[1]) == 0
    put(files, KEYS[1], 0, page(1))
    assert read(files, KEYS[1])[0] is Verdict.GOOD


def test_a_write_that_fails_leaves_nothing(files, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("penstock.memory.stores.files.os.writev", full)
    with pytest.raises(OSError, match="No space"):
        put(files, KEYS[1], 0, page(1))
    assert not list(Folder(files.root).objects())


def test_two_containers_with_the_same_process_ids_store_the_same_page_at_once(tmp_path, monkeypatch):
    """Each counts from 0: a write of one must not meet the temporary file of the other, nor what one that was
    killed has left."""
    one, two = (Files(tmp_path / "store", FP, SIZES) for _ in range(2))
    drain, size = files_module._drain, 256 + HEADER.size

    def meanwhile(fd, parts):
        monkeypatch.setattr(files_module, "_drain", drain)
        for _ in range(4):                                  # whatever the other has counted to
            assert put(two, KEYS[1], 0, page(1)) == size
            two.delete([KEYS[1]], 0)
        drain(fd, parts)

    monkeypatch.setattr(files_module, "_drain", meanwhile)
    assert put(one, KEYS[1], 0, page(1)) == size
    assert read(two, KEYS[1]) == (Verdict.GOOD, bytes(page(1)))


def test_a_sweep_removes_what_was_used_longest_ago_and_left_overs(files):
    for i, key in enumerate(KEYS[:20]):
        put(files, key, 0, page(i))
        os.utime(where(files, key), (1_000_000 + i, 1_000_000 + i))
    assert read(files, KEYS[0])[0] is Verdict.GOOD   # a use
    old, new = (where(files, KEYS[1]).with_name(f"x.{n}.tmp") for n in range(2))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (5, 5))
    each = 256 + HEADER.size
    assert Folder(files.root).sweep(100 * each) == (20 * each + 4, 4)
    assert new.exists() and not old.exists()
    left, gone = Folder(files.root).sweep(10 * each)        # down to nine tenths of that
    assert (left, gone) == (8 * each + 4, 12 * each)
    assert [bool(present(files, key)) for key in KEYS[:20]] == [True] + [False] * 12 + [True] * 7
    with open(files.root / "lock") as lock:          # another engine does it
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert Folder(files.root).sweep(1) == (left, 0)


def test_a_sweep_of_a_locked_folder_lists_nothing(files, monkeypatch):
    put(files, KEYS[0], 0, page(0))
    left, _ = Folder(files.root).sweep(None)
    with open(files.root / "lock") as lock:          # another engine sweeps
        fcntl.flock(lock, fcntl.LOCK_EX)
        monkeypatch.setattr(Folder, "objects", lambda self: pytest.fail("it was listed"))
        assert Folder(files.root).sweep(1) == (left, 0)


def test_an_engine_sweeps_in_another_process(files, monkeypatch):
    for i, key in enumerate(KEYS[:4]):
        put(files, key, 0, page(i))
        os.utime(where(files, key), (1_000_000 + i, 1_000_000 + i))
    monkeypatch.setattr(Folder, "objects", lambda self: pytest.fail("this process listed the folder"))
    each = 256 + HEADER.size
    assert files.sweep(None, 0) == (4 * each, 0)
    assert files.sweep(3 * each, 0) == (2 * each, 2 * each)
    assert [bool(present(files, key)) for key in KEYS[:4]] == [False, False, True, True]
    (files.root / "lock").unlink()
    (files.root / "lock").mkdir()
    with pytest.raises(OSError, match=r"sweep of .* failed: IsADirectoryError"):
        files.sweep(None, 0)


def test_folders_that_are_not_ours_are_refused_in_words(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / ".hidden").mkdir()
    with pytest.raises(ConfigError, match=r"holds photos.*give an empty folder"):
        open_root(tmp_path, readonly=False)
    with pytest.raises(ConfigError, match=r"Not a directory.*give a folder"):
        (tmp_path / "file").write_text("x")
        open_root(tmp_path / "file", readonly=False)
    with pytest.raises(ConfigError, match=r"No such file.*read"):
        open_root(tmp_path / "nowhere", readonly=True)


def test_engines_on_a_folder_share_one_secret_that_only_their_user_reads(tmp_path):
    def of(folder: Path) -> StorageUrl:
        return StorageUrl("file", None, str(folder))

    root = tmp_path / "store"
    url = of(root)
    secret = secret_of(url, None, readonly=False)
    assert len(secret) == 32 and secret == secret_of(url, None, readonly=False)
    assert secret == secret_of(url, None, readonly=True)
    assert secret != secret_of(of(tmp_path / "other"), None, readonly=False)
    assert (root / "secret").stat().st_mode & 0o777 == 0o600
    (root / "secret").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        secret_of(url, None, readonly=False)
    (root / "secret").unlink()
    assert secret_of(url, None, readonly=True) != secret_of(url, None, readonly=True), "of this process, then"
    assert not (root / "secret").exists()


def test_a_secret_of_a_file_is_the_same_for_every_store_and_one_is_made_for_stores_elsewhere(tmp_path,
                                                                                               monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    urls = [StorageUrl("file", None, str(tmp_path / "store")), StorageUrl("valkey", "here", "", 1)]
    key = tmp_path / "key"
    key.write_text("0123456789abcdef\n")
    key.chmod(0o600)
    first, second = (secret_of(url, str(key), readonly=False) for url in urls)
    assert first == second and len(first) == 32
    made = secret_of(urls[1], None, readonly=True)
    assert made == secret_of(urls[1], None, readonly=False) != secret_of(urls[0], None, readonly=False)
    key.write_text("short")
    with pytest.raises(ConfigError, match="has 5 characters"):
        secret_of(urls[0], str(key), readonly=False)
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod o="):
        secret_of(urls[0], str(key), readonly=False)


def test_what_is_used_elsewhere_or_put_again_is_not_old(files):
    """Pages that stay in host memory are never read here: the hottest prompt would be swept first."""
    for key in KEYS[:10]:
        put(files, key, 0, page(key[0]))
        os.utime(where(files, key), (1000 + key[0], 1000 + key[0]))
    files.used([KEYS[0], KEYS[20], KEYS[1]])
    assert put(files, KEYS[2], 0, page(2)) == 0
    Files(files.root, FP, SIZES, readonly=True).used([KEYS[3]])
    each = SIZES[0] + HEADER.size
    files.sweep(5 * each, each)
    assert [key[0] for key in KEYS[:10] if present(files, key)] == [0, 1, 2, 9]


@pytest.mark.parametrize(("url", "words"), [
    ("s3://bucket", r"obstore is not installed: pip install '\.\[s3\]'"),
    ("redis://me:word@host", r"valkey://host: redis is not installed: pip install '\.\[valkey\]'")])
def test_a_missing_extra_is_told_by_name_before_a_model_is_loaded(monkeypatch, url, words):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=words) as told:
        check_storage(KVConfig(kv_storage=url))
    assert "word" not in str(told.value)
