"""The server's log on stderr: who reads it decides its form.

A terminal gets `penstock: message`; a file or a service manager gets a time and a level before it;
`--log-format json` is an object a line. Owns the form, not what is said.
"""
from __future__ import annotations

import json
import logging
import sys
from datetime import datetime
from typing import Any

from penstock.config.settings.tree import ServerConfig

log = logging.getLogger("penstock")
FIELDS = "penstock_fields"          # of a record: what a program may read in it


class _Text(logging.Formatter):
    def __init__(self, *, timed: bool) -> None:
        super().__init__()
        self._timed = timed

    def format(self, record: logging.LogRecord) -> str:
        level = record.levelname
        text = super().format(record)
        if self._timed:
            return f"{_time(record)} {level} penstock: {text}"
        return f"penstock: {text}" if level == "INFO" else f"penstock: {level.lower()}: {text}"


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, FIELDS, {})
        return json.dumps({"time": _time(record), "level": record.levelname.lower(), "logger": record.name,
                           "message": super().format(record), **fields})


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


def set_up(config: ServerConfig) -> None:
    """Set up the logs of this process, once."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if config.log_format == "json" else _Text(timed=not sys.stderr.isatty()))
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])
    logging.getLogger("uvicorn").setLevel(
        (config.log_level_http or ("debug" if config.log_level == "debug" else "warning")).upper())
    if config.log_level != "debug":
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    if logs_access(config):
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)


def logs_access(config: ServerConfig) -> bool:
    return config.log_level == "debug" if config.access_log is None else config.access_log


def info(line: str) -> None:
    """A line of ours, or of a process of ours."""
    log.info("%s", line.removeprefix("penstock: "))


def error(line: str) -> None:
    log.error("%s", line.removeprefix("penstock: "))
