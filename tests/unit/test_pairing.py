"""What is wrong with the flags of one end of a pair is told before anything is loaded."""
from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config.base.errors import ConfigError
from penstock.config.settings.cli import from_options
from penstock.engine import process as engine_main
from penstock.engine.record import EventLog
from penstock.exec.start import build
from penstock.transfer.streams import LinkSettings


@pytest.mark.parametrize("key, options, said", [
    (None, {}, "the same secret"), ("short", {}, "16 or more"), ("k" * 16, {"disaggregation_listen": "h"}, "HOST:PORT"),
    ("k" * 16, {"pair_tls_cert": "/nowhere.pem"}, "--cluster-tls-cert /nowhere.pem: no PEM"),
    ("k" * 16, {"disaggregation_listen": "10.0.0.1:1"}, "from other machines")])
def test_bad_flags_are_told_before_a_model_is_loaded(
        key: str | None, options: dict[str, object], said: str, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(build, "build_engine", load)
    monkeypatch.delenv("PENSTOCK_CLUSTER_KEY", raising=False)
    if key is not None:
        (tmp_path / "key").write_text(key)
        (tmp_path / "key").chmod(0o600)
        options = {"pair_key_file": str(tmp_path / "key"), **options}
    config = from_options("demo", {"disaggregation_mode": "prefill", "disaggregation_listen": "127.0.0.1:0", **options})
    with pytest.raises(ConfigError, match=said):
        engine_main.build(config, EventLog())


def test_a_key_is_not_shown() -> None:
    settings = LinkSettings(role="prefill", address="h:1", listens=True, key=b"marker-7" * 4)
    assert "marker-7" not in repr(settings)
