"""The line that says how busy a server is, and the log's form for who reads it."""
from __future__ import annotations

import asyncio
import io
import json
import logging
import re

import pytest

from penstock.api import logs, status
from penstock.config.settings.cli import Parser, add_flags, config_from, prepare
from penstock.config.settings.tree import ServerConfig

BEFORE = {"executor_prefill_tokens_total": 100.0, "generation_tokens_total": 10.0, "prefix_queries": 50.0,
          "prefix_hbm_hits": 10.0}
NOW = {"requests_running": 3.0, "requests_waiting": 2.0, "executor_prefill_tokens_total": 1100.0,
       "generation_tokens_total": 60.0, "prefix_queries": 150.0, "prefix_hbm_hits": 60.0,
       "prefix_dram_hits": 25.0, "hbm_pages": 8.0, "hbm_pages_in_use": 2.0, "dram_pages": 4.0,
       "dram_pages_held": 3.0, "disk_pages": 0.0}


def test_a_status_line_has_what_happened_since_the_last_one():
    assert status.line(status.status(BEFORE, NOW, 10.0)) == (
        "status: 3 running, 2 waiting; 25.0% of device KV, 75.0% of host KV; 100.0 prompt tokens/s, "
        "5.0 output tokens/s; prefix hit rate 75.0%")


def test_an_idle_server_says_nothing_and_one_that_has_just_ended_does():
    idle = {**NOW, "requests_running": 0.0, "requests_waiting": 0.0}
    assert status.status(NOW, idle, 10.0) is None
    assert status.status(BEFORE, idle, 10.0)["output_tokens_per_s"] == 5.0
    again = status.status(NOW, {**BEFORE, "requests_running": 1.0}, 10.0)     # an engine that counts anew
    assert again["output_tokens_per_s"] == 0 and again["prefix_hit_rate"] is None


def test_lines_come_while_busy_only(caplog):
    told = iter([BEFORE, NOW, {**NOW, "requests_running": 0.0, "requests_waiting": 0.0}])

    async def stats():
        try:
            return next(told)
        except StopIteration:
            raise asyncio.CancelledError from None

    with caplog.at_level(logging.INFO, "penstock.status"), pytest.raises(asyncio.CancelledError):
        asyncio.run(status.report(stats, 0.01))
    assert [r.message[:26] for r in caplog.records] == ["status: 3 running, 2 waiti"]
    assert getattr(caplog.records[0], logs.FIELDS)["running"] == 3


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "form", "expected"), [
    (Terminal(), "text", r"penstock: hello\npenstock: error: gone\n"),
    (io.StringIO(), "text", r"20[\d-]+T[\d:.]+[+-]\d\d:\d\d INFO penstock: hello\n\S+ ERROR penstock: g"),
    (Terminal(), "json", None)])
def test_the_log_has_times_and_levels_where_no_terminal_reads_it(monkeypatch, stream, form, expected):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr("sys.stderr", stream)
    before = root.level
    try:
        logs.set_up(ServerConfig(log_format=form))
        logs.info("penstock: hello")
        logs.error("gone")
        logging.getLogger("penstock.status").info("busy", extra={logs.FIELDS: {"running": 3}})
    finally:
        root.setLevel(before)
    told = stream.getvalue()
    if expected is not None:
        assert re.match(expected, told)
        return
    one, two, three = map(json.loads, told.splitlines())
    assert one.keys() == {"time", "level", "logger", "message"} and one["message"] == "hello"
    assert (two["level"], three["running"], three["logger"]) == ("error", 3, "penstock.status")


@pytest.mark.parametrize(("words", "field", "value"), [
    ("--disable-log-stats", "log_stats_interval", 0.0),
    ("--decode-log-interval 40", "log_stats_interval", 40.0),
    ("--log-stats-interval 2.5", "log_stats_interval", 2.5), ("--access-log", "access_log", True),
    ("--disable-uvicorn-access-log", "access_log", False), ("--no-access-log", "access_log", False),
    ("--uvicorn-log-level info", "log_level_http", "info"),
    ("--log-level-http error", "log_level_http", "error"),
    ("--log-format json", "log_format", "json"), ("--admin-api-key k", "admin_api_key", "k")])
def test_flags_of_logs_as_people_type_them(words, field, value):
    parser = Parser(prog="penstock serve")
    add_flags(parser)
    server = config_from(parser.parse(prepare([*words.split(), "demo"]))).server
    assert getattr(server, field) == value


def test_an_access_log_is_on_when_asked_for_or_debugging():
    assert logs.logs_access(ServerConfig(access_log=True))
    assert logs.logs_access(ServerConfig(log_level="debug"))
    assert not logs.logs_access(ServerConfig())
    assert not logs.logs_access(ServerConfig(log_level="debug", access_log=False))
