"""Pages of KV as files in a folder, one object a page and cache group, named by what it holds.

    ROOT/v1/FINGERPRINT/ab/cdef....G      the page with key abcdef...., of cache group G
    ROOT/v1/FINGERPRINT/manifest.json     what the fingerprint stands for, in words: for people

An object is 64 bytes of header, then the bytes of the host page. The name is the index: there is no journal,
and nothing that must survive but the objects. One is whole or is not there: it is written under another name
and renamed; what power loss or anybody else leaves is found by its checksum, and is a miss. Nothing read here
is used as a size, an index or a path. Knows nothing of requests or of the core's slots.
"""
from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from penstock.config.base import child
from penstock.config.base.errors import ConfigError
from penstock.memory.stores.objects import (
    FORMAT,
    HEADER,
    LARGEST,
    Bounded,
    Inventory,
    Object,
    Verdict,
    examined,
    header_of,
    is_sealed,
)

LOW_WATER = 0.9             # of the quota: what a sweep leaves
TOUCH_S, STALE_S = 60.0, 3600.0     # how often a hit is noted as a use; age of temporary files that go
# What the process of a sweep runs. It imports neither torch nor numpy.
_SWEEP = """
import os, sys
from pathlib import Path
from penstock.memory.stores.files import Folder
os.nice(10)
root, quota, room = sys.argv[1:]
print(*Folder(Path(root)).sweep(int(quota) if quota else None, int(room)))
"""
_OURS = frozenset((FORMAT, "secret", "lock", "lost+found"))
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECTORY


def open_root(root: Path, *, readonly: bool) -> None:
    """Make the folder, or see that it is one of ours. Raises ConfigError."""
    try:
        names = os.listdir(root) if readonly or root.exists() else []
        if others := sorted(n for n in names if n not in _OURS and not n.startswith(".")):
            raise ConfigError(f"--kv-storage {root}: holds {', '.join(others[:3])}, which storage of format "
                              f"{FORMAT} has not: give an empty folder, or one that this version has made")
        if (root / FORMAT).is_symlink():
            raise ConfigError(f"--kv-storage {root}: {FORMAT} in it is a link: give the folder it leads to")
        if not readonly:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            (root / FORMAT).mkdir(mode=0o700, exist_ok=True)
            if not os.access(root / FORMAT, os.W_OK | os.X_OK):
                raise ConfigError(f"--kv-storage {root}: it cannot be written to: give a folder of this "
                                  "user, or take --kv-storage-readonly")
    except OSError as e:
        raise ConfigError(f"--kv-storage {root}: {e.strerror}: give a folder that this user can "
                          f"{'read' if readonly else 'write to'}") from None


class Folder(Inventory):
    """All objects of a folder. Follows no link."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def objects(self) -> Iterator[Object]:
        if not (self.root / FORMAT).exists():
            return
        for at, folders, names, fd in os.fwalk(self.root / FORMAT, follow_symlinks=False):
            folders[:] = [name for name in folders if not name.startswith(".")]
            below = os.path.relpath(at, self.root / FORMAT)
            for name in names if "/" in below else ():
                with contextlib.suppress(FileNotFoundError):
                    found = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    if stat.S_ISREG(found.st_mode):
                        yield Object(os.path.join(FORMAT, below, name), below.split("/")[0], found.st_size,
                                     found.st_mtime, name.endswith(".tmp"))

    def examine(self, o: Object) -> Verdict:
        folder, name = os.path.split(o.name)
        digits, _, group = name.partition(".")
        try:
            fd = os.open(self.root / o.name, _READ)
        except FileNotFoundError:
            return Verdict.GONE
        try:
            data = memoryview(bytearray(o.bytes if o.bytes <= LARGEST else 0))
            whole = _fill(fd, [data])
            return examined(os.path.basename(folder) + digits, group, data) if whole else Verdict.BAD
        finally:
            os.close(fd)

    def remove(self, objects: Sequence[Object]) -> None:
        for o in objects:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.root / o.name)

    def purge(self) -> None:
        self.remove(list(self.objects()))           # raises what matters
        for path in (self.root / FORMAT).iterdir():
            shutil.rmtree(path, ignore_errors=True)                 # engines may write meanwhile

    def sweep(self, quota: int | None, room: int = 0) -> tuple[int, int]:
        """Remove temporary files without a writer, and, where `quota` bytes have no `room` for
        more, what was used longest ago, down to LOW_WATER of them. Returns bytes that are left and bytes
        removed. While another engine sweeps, nothing is listed: it returns what the last sweep left, or waits
        if there was none."""
        with contextlib.ExitStack() as stack:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            lock = os.open(self.root / "lock", flags, 0o600)
            stack.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if (last := os.pread(lock, 32, 0).strip()).isdigit():
                    return int(last), 0
                fcntl.flock(lock, fcntl.LOCK_EX)
            found = list(self.objects())
            left = sum(o.bytes for o in found)
            before, now = left, time.time()
            over = quota is not None and left + room > quota
            for o in sorted(found, key=lambda o: o.used) if over else [o for o in found if o.temporary]:
                stale = o.temporary and now - o.used > STALE_S
                if stale or (over and left > LOW_WATER * (quota or 0) and not o.temporary):
                    self.remove([o])
                    left -= o.bytes
            with contextlib.suppress(OSError):       # a full disk: others wait then
                os.pwrite(lock, f"{left:<32}".encode(), 0)           # one length: a reader sees old or new
            return left, before - left


class Files(Bounded):
    """The objects of one kind of engine in a folder."""

    readers, writers, part = 4, 2, 16

    def __init__(self, root: Path, fingerprint: str, page_bytes: Sequence[int], *, readonly: bool = False,
                 words: Mapping[str, str] | None = None) -> None:
        """page_bytes: of a page of each cache group. words: for the manifest. Raises ConfigError."""
        open_root(root, readonly=readonly)
        self.root, self.readonly, self._sizes = root, readonly, tuple(page_bytes)
        self._home, self._words = root / FORMAT / fingerprint, dict(words or {})
        self._folders: dict[str, int] = {}       # descriptors: no name of a link is followed
        # Containers that share a folder may have the same process ids: names must differ without them.
        self._temps, self._run = itertools.count(), os.urandom(8).hex()
        if not readonly:
            try:
                self._home.mkdir(mode=0o700, exist_ok=True)
                self._write_manifest()
            except OSError as e:
                raise ConfigError(f"--kv-storage {root}: {e.strerror}: give a folder that this user can "
                                  "write to") from None

    def _write_manifest(self) -> None:
        path = self._home / "manifest.json"
        if not path.exists():
            temp = self._home / f".manifest.{self._run}.{next(self._temps)}"
            with open(os.open(temp, _WRITE, 0o600), "w", encoding="utf-8") as file:
                file.write(json.dumps({"format": FORMAT, "page_bytes": self._sizes, **self._words}, indent=1))
            os.replace(temp, path)

    # ------------------------------------------------------------ names
    def _folder(self, key: bytes, *, make: bool = False) -> int:
        """Descriptor of the folder of a key. Raises FileNotFoundError."""
        name = key[:1].hex()
        fd = self._folders.get(name)
        if fd is not None and os.fstat(fd).st_nlink:
            return fd
        if make:
            for folder in (self._home.parent, self._home, self._home / name):
                folder.mkdir(mode=0o700, exist_ok=True)
            self._write_manifest()             # somebody may have purged it
        home = os.open(self._home, _FOLDER)
        try:
            fd = os.open(name, _FOLDER, dir_fd=home)
        finally:
            os.close(home)
        # Two threads may both open it: one descriptor of 256 is left open then.
        self._folders[name] = fd
        return fd

    @staticmethod
    def _name(key: bytes, group: int) -> str:
        return f"{key[1:].hex()}.{group}"

    # ------------------------------------------------------------ objects
    def present(self, keys: Sequence[bytes]) -> Iterator[int]:
        """Return, for each key, bits: g is set if there is a page of cache group g, by its name and length alone."""
        return map(self._present, keys)

    def _present(self, key: bytes) -> int:
        try:
            folder, found = self._folder(key), 0
        except FileNotFoundError:
            return 0
        for group, size in enumerate(self._sizes):
            with contextlib.suppress(FileNotFoundError):
                at = os.stat(self._name(key, group), dir_fd=folder, follow_symlinks=False)
                found |= (stat.S_ISREG(at.st_mode) and at.st_size == HEADER.size + size) << group
        return found

    def get(self, keys: Sequence[bytes], group: int, pages: Sequence[memoryview]) -> Iterator[Verdict]:
        """Read objects into `pages`, whose bytes are anything unless the verdict is GOOD."""
        return (self._get(key, group, page) for key, page in zip(keys, pages, strict=True))

    def _get(self, key: bytes, group: int, page: memoryview) -> Verdict:
        assert len(page) == self._sizes[group], f"a page of {len(page)} bytes"
        try:
            fd = os.open(self._name(key, group), _READ, dir_fd=self._folder(key))
        except FileNotFoundError:
            return Verdict.GONE
        except OSError as e:
            if e.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                return Verdict.BAD
            raise
        try:
            at = os.fstat(fd)
            if not stat.S_ISREG(at.st_mode) or at.st_size != HEADER.size + len(page):
                return Verdict.BAD
            header = bytearray(HEADER.size)
            if not (_fill(fd, [memoryview(header), page]) and is_sealed(header, key, group, page)):
                return Verdict.BAD
            if not self.readonly and time.time() - at.st_mtime > TOUCH_S:
                with contextlib.suppress(OSError):
                    os.utime(fd)
            return Verdict.GOOD
        finally:
            os.close(fd)

    def put(self, keys: Sequence[bytes], group: int, pages: Sequence[memoryview]) -> Iterator[int]:
        """Store pages, unless they are there. Yields the bytes that were written of each."""
        assert not self.readonly
        return (self._put(key, group, page) for key, page in zip(keys, pages, strict=True))

    def _put(self, key: bytes, group: int, page: memoryview) -> int:
        assert len(page) == self._sizes[group]
        folder, name = self._folder(key, make=True), self._name(key, group)
        if self._present(key) >> group & 1:
            self._touch(folder, name)
            return 0
        temp = f"{name}.{self._run}.{next(self._temps)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temp, flags, 0o600, dir_fd=folder)
        try:
            try:
                _drain(fd, [memoryview(header_of(key, group, page)), page])
            finally:
                os.close(fd)
            os.rename(temp, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temp, dir_fd=folder)
            raise
        return HEADER.size + len(page)

    def used(self, keys: Sequence[bytes]) -> None:
        """See `Store`: what a sweep goes by is when a file was written or used last."""
        for key in () if self.readonly else keys:
            with contextlib.suppress(FileNotFoundError):
                for group in range(len(self._sizes)):
                    self._touch(self._folder(key), self._name(key, group))

    @staticmethod
    def _touch(folder: int, name: str) -> None:
        with contextlib.suppress(FileNotFoundError, PermissionError):     # another user's may be read only
            os.utime(name, dir_fd=folder, follow_symlinks=False)

    def delete(self, keys: Sequence[bytes], group: int) -> None:
        """Remove objects, those that are there."""
        for key in keys:
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(self._name(key, group), dir_fd=self._folder(key))

    def sweep(self, quota: int | None, room: int) -> tuple[int, int]:
        """See `Folder.sweep`. It runs in a process of its own, at low priority: a listing of 100,000 objects
        takes a second of Python, which would delay every turn of this process."""
        words = str(self.root), "" if quota is None else str(quota), str(room)
        done = child.run(_SWEEP, *words)
        if done.returncode:
            last = done.stderr.strip().rpartition("\n")[2]
            raise OSError(errno.EIO, f"the sweep of {self.root} failed: {last}")
        left, gone = map(int, done.stdout.split())
        return left, gone

    @property
    def free_bytes(self) -> int:
        return shutil.disk_usage(self.root).free

    def close(self) -> None:
        for fd in self._folders.values():
            os.close(fd)
        self._folders.clear()


def _fill(fd: int, into: list[memoryview]) -> bool:
    """Whether the file had so many bytes."""
    at, end = 0, sum(map(len, into))
    while at < end:
        n = os.preadv(fd, _rest(into, at), at)
        if n == 0:
            return False
        at += n
    return True


def _drain(fd: int, parts: list[memoryview]) -> None:
    at, end = 0, sum(map(len, parts))
    while at < end:
        at += os.writev(fd, _rest(parts, at))


def _rest(parts: list[memoryview], at: int) -> list[memoryview]:
    """What follows the first `at` bytes."""
    found = []
    for part in parts:
        if at < len(part):
            found.append(part[at:])
        at = max(0, at - len(part))
    return found
