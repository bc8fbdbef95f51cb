"""The log of the server's process on standard error, as text or as a JSON object per line."""

from __future__ import annotations

import json
import logging
import queue
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener

NAMES = {"onward": logging.DEBUG, "uvicorn": logging.WARNING}  # loggers to write, with their minimum levels
MOST_WAITING = 10_000  # lines that wait for a slow reader of the log; further ones are lost


def time_of(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


class TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{time_of(record)} {record.levelname.lower()} {super().format(record)}"


class JSONLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", None)
        line = {"time": time_of(record), "level": record.levelname.lower(), "logger": record.name}
        line |= {"message": "request", **fields} if fields else {"message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class Lines(QueueHandler):
    """Hands records to another thread, so that the server never waits for the reader of its log."""

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record  # the record is formatted in this process

    def handleError(self, record: logging.LogRecord) -> None:
        pass  # the queue is full: the record is lost


def log_warning(message: Warning | str, *details: object) -> None:
    """Write a warning of Python's module `warnings` to the log."""
    logging.getLogger("onward.serving").warning("%s", message)


@contextmanager
def logged(form: str, level: str) -> Iterator[None]:
    """Write the log of the server, and warnings, to standard error inside the `with` block: `form` is text or json,
    `level` the minimum level."""
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(JSONLines() if form == "json" else TextLines("%(message)s"))
    waiting: queue.Queue[logging.LogRecord] = queue.Queue(MOST_WAITING)
    listener, handler = QueueListener(waiting, stream), Lines(waiting)
    loggers = {logging.getLogger(name): least for name, least in NAMES.items()}
    before = {logger: logger.level for logger in loggers}
    for logger, least in loggers.items():
        logger.addHandler(handler)
        logger.setLevel(max(least, logging.getLevelNamesMapping()[level.upper()]))
    listener.start()
    show, warnings.showwarning = warnings.showwarning, log_warning  # type: ignore[assignment]  # called by position
    try:
        yield
    finally:
        warnings.showwarning = show
        for logger, earlier in before.items():
            logger.removeHandler(handler)
            logger.setLevel(earlier)
        listener.stop()
