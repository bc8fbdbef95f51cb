"""Decoders that no published family can express: the DecoderConfig under the key `decoder`, and our tensor names."""

from collections.abc import Iterator
from typing import Any

from onward.base import fields
from onward.base.errors import UserError
from onward.config.decoder import DecoderConfig
from onward.families import HF, Row

ARCHITECTURES = {"onward": "Decoder"}
BASE = ""
IGNORED = ""
PRESETS: dict[str, HF | DecoderConfig] = {}
ANCESTORS: dict[str, str] = {}


def config(hf: HF) -> DecoderConfig:
    if not isinstance(hf.get("decoder"), dict):
        raise UserError("config.json has model_type onward but no table `decoder`: write the folder again")
    return fields.build(DecoderConfig, hf["decoder"], "config.json: decoder")


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return {"decoder": fields.plain(c)}


def names(c: DecoderConfig) -> Iterator[Row]:
    """No rows: a tensor without a row keeps its name."""
    yield from ()
