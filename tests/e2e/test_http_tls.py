"""HTTPS, a certificate that is read again, and pages of other origins."""
from __future__ import annotations

import shutil
import signal
import ssl
from pathlib import Path

import httpx
import pytest
from http_server import Server

from penstock.api.server import tls_of
from penstock.config.base.errors import ConfigError
from penstock.config.settings.tree import ServerConfig

PEM = Path(__file__).parents[1] / "data" / "pair_tls.pem"
ASK = {"prompt": "hello", "max_tokens": 3}


@pytest.fixture
def pem(tmp_path) -> Path:
    found = tmp_path / "cert.pem"
    shutil.copy(PEM, found)
    found.chmod(0o600)
    return found


def test_https_with_a_certificate_that_is_read_again(tmp_path, pem):
    trust = ssl.create_default_context(cafile=str(PEM))
    trust.check_hostname = False                # this one names no host
    server = Server(tmp_path, "--ssl-certfile", str(pem), verify=trust)
    try:
        assert server.line.startswith("penstock: ready on https://")
        assert server.post(**ASK).json()["choices"][0]["text"] == "hello" * 3
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{server.http.base_url.port}/health")
        server.process.send_signal(signal.SIGHUP)
        server.until(lambda: "certificate read again" in server.log.read_text())
        pem.write_text("nothing")
        server.process.send_signal(signal.SIGHUP)
        server.until(lambda: "the certificate stays as it was" in server.log.read_text())
        assert server.http.get("/health").status_code == 200
    finally:
        assert server.end(signal.SIGTERM) == 0


def test_certificates_that_are_none(tmp_path, pem):
    assert tls_of(ServerConfig()) is None
    for text, mode, word in (("nothing", 0o600, "PEM"), (PEM.read_text(), 0o644, "chmod"),
                             ("", 0o600, "PEM")):
        pem.write_text(text)
        pem.chmod(mode)
        with pytest.raises(ConfigError, match=word):
            tls_of(ServerConfig(ssl_certfile=str(pem)))
    with pytest.raises(ConfigError, match="readable"):
        tls_of(ServerConfig(ssl_certfile="/nowhere.pem"))


def test_pages_of_other_origins_ask_only_where_that_was_said(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("secret")
    keys.chmod(0o600)
    server = Server(tmp_path, "--cors-origins", "https://chat.example.com", "--api-key-file", str(keys))
    try:
        def asks(origin: str, **more: str) -> httpx.Response:
            return server.http.options("/v1/completions", headers={
                "origin": origin, "access-control-request-method": "POST",
                "access-control-request-headers": "authorization", **more})

        name = "access-control-allow-origin"
        assert asks("https://chat.example.com").headers[name] == "https://chat.example.com"
        assert name not in asks("https://evil.example.com").headers
        key = {"authorization": "Bearer secret", "origin": "https://chat.example.com"}
        got = server.http.post("/v1/completions", json=ASK, headers=key)
        assert got.status_code == 200 and got.headers[name] == "https://chat.example.com"
        without = server.http.post("/v1/completions", json=ASK, headers={"origin": key["origin"]})
        assert without.status_code == 401
        streamed = server.http.post("/v1/completions", json={**ASK, "stream": True}, headers=key)
        assert streamed.headers[name] == "https://chat.example.com" and "[DONE]" in streamed.text
    finally:
        assert server.end(signal.SIGTERM) == 0
