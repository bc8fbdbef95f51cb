"""The options of the server. Imports neither torch nor the libraries of the server."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from onward.base.arguments import Range
from onward.base.errors import UserError
from onward.config.ranges import Size, SizeOrZero
from onward.serving.keys import Key, check_keys, read_keys

KEY_VARIABLE = "ONWARD_API_KEY"  # environment variable
ToolParser = Literal["auto", "harmony", "qwen3_coder", "hermes", "mistral_args", "mistral", "llama3_json", "json"]
ReasoningParser = Literal["auto", "none", "think", "mistral", "harmony"]
LOCAL = "localhost", "127.0.0.1", "::1"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Engines of the server: how they run, and how their answers are read; the defaults are those of `onward serve`."""

    rows: Annotated[int, Range(1, 4096)] = 16  # number of answers generated at the same time; further requests wait
    context: Size | None = None  # maximum number of tokens in a prompt and its answer; default: the model's context
    cache_memory: str = ""  # memory for the cache, such as 2GB; default: rows x context, at most half of what is free
    prefill_budget: Annotated[int, Range(1, 1 << 20)] = 128  # prompt tokens per step while other requests are decoded
    draft: str = ""  # folder of a smaller model, a draft head or an EAGLE-3 draft; mtp: the model's own layer
    lookup: SizeOrZero | None = None  # tokens to draft by looking up the last tokens; 0: none; default: if it is faster
    tool_parser: ToolParser = "auto"  # format of tool calls in answers; auto: that of the chat template
    reasoning_parser: ReasoningParser = "auto"  # format of reasoning in answers; auto: that of the chat template
    prompt_cache: str = ""  # folder in which the keys and values of prompts are kept for the next start
    prompt_cache_size: str = "10GB"  # maximum size of the files in prompt_cache; the least recently used are removed
    mmap: bool = True  # use the weights in their files, which must not change; otherwise copy them to memory


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Limits on the requests of a client."""

    max_queue: Annotated[int, Range(0, 1 << 20)] = 64  # maximum number of waiting answers; further ones get status 429
    max_body: str = "8MB"  # maximum size of a request in bytes
    max_messages: Annotated[int, Range(1, 1 << 20)] = 1024  # maximum number of messages in a conversation
    max_values: Annotated[int, Range(1, 1 << 30)] = 1 << 18  # maximum number of values in the JSON of a request
    max_unread: Annotated[int, Range(1, 1 << 20)] = 256  # unread tokens of a stream after which its answers wait
    constraint_time: Annotated[float, Range(0.01, 3600)] = 5.0  # seconds to prepare a regex, schema or grammar
    constraint_memory: str = "512MB"  # memory that one constraint may take
    max_constraints: Annotated[int, Range(1, 4096)] = 16  # maximum number of prepared constraints, one process each
    share: Annotated[float, Range(0, 1)] = 0.5  # largest share of rows that a client has while another client waits


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Connections: how many are open at a time, and for how many seconds each waits for its client."""

    max_connections: Annotated[int, Range(1, 1 << 20)] = 4096  # connections at a time, within the descriptor limit
    receive_timeout: Annotated[float, Range(0, 86400)] = 30.0  # seconds in which a client must send a whole request
    send_timeout: Annotated[float, Range(0, 86400)] = 60.0  # seconds after which a client that reads nothing is dropped
    keep_alive: Annotated[float, Range(0, 86400)] = 30.0  # seconds that a connection stays open between two requests


@dataclass(frozen=True, kw_only=True)
class Listening(RequestLimits, ConnectionLimits):
    """Address and access: where the server listens, and which clients it answers."""

    host: str = "127.0.0.1"  # address to listen on; 0.0.0.0: all addresses of this machine
    port: Annotated[int, Range(0, 65535)] = 8000  # port; 0: any free port
    api_key: tuple[str, ...] = ()  # keys that clients must send, in addition to $ONWARD_API_KEY
    api_key_file: str = ""  # keys, one per line, or a .toml file with their names and limits; SIGHUP reads it again
    allow_host: tuple[str, ...] = ()  # additional names of this server to accept in the Host header
    allow_origin: tuple[str, ...] = ()  # websites whose pages may call the API, such as https://example.org
    drain: Annotated[float, Range(0, 86400)] = 30.0  # time limit in seconds for running answers after SIGTERM
    log_format: Literal["text", "json"] = "text"  # format of the log on standard error; json: one object per line
    log_level: Literal["debug", "info", "warning", "error"] = "info"  # minimum level in the log; info: each request
    log_prompts: bool = False  # write prompts and answers to the log
    otlp_traces_endpoint: str = ""  # collector of OpenTelemetry for traces, such as http://127.0.0.1:4318/v1/traces

    def keys(self) -> list[Key]:
        """The API keys that clients may use; [] if none is needed."""
        given = [*self.api_key, *([os.environ[KEY_VARIABLE]] if os.environ.get(KEY_VARIABLE) else [])]
        keys = [Key(key=key, name=f"key {number}") for number, key in enumerate(given, 1)]
        for key in read_keys(Path(self.api_key_file)) if self.api_key_file else ():
            keys.append(key if key.name else replace(key, name=f"key {len(keys) + 1}"))
        check_keys(keys)
        return keys

    @property
    def is_local(self) -> bool:
        return self.host in LOCAL


def check_listening(options: Listening) -> None:
    """Raise a UserError for a website or a collector that is not an address as clients write it, or a size that is not
    a number of bytes."""
    from onward.planning.tables import byte_count

    for name in "max_body", "constraint_memory":
        byte_count(getattr(options, name), name)
    for origin in options.allow_origin:
        if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+", origin):
            raise UserError(f"allow_origin is {origin!r}: write scheme and host only, such as https://example.org")
    if options.otlp_traces_endpoint and not re.match(r"https?://[^/\s]", options.otlp_traces_endpoint):
        raise UserError(
            f"otlp_traces_endpoint is {options.otlp_traces_endpoint!r}: write an address, such as "
            "http://127.0.0.1:4318/v1/traces"
        )
