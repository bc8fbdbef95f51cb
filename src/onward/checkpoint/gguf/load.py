"""A GGUF file as a model: its family, its decoder and its stored tensors, as a folder has them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from onward.checkpoint.gguf.architectures import Architecture, architecture
from onward.checkpoint.gguf.header import Header
from onward.checkpoint.gguf.tensors import stored_tensors
from onward.checkpoint.weights import StoredTensor
from onward.config.decoder import DecoderConfig

VECTORS = "ffn_gate_inp_shexp.weight"  # some files have a matrix of one row


def read_model(header: Header) -> tuple[dict[str, Any], Architecture, DecoderConfig, dict[str, StoredTensor]]:
    """The keys for a config.json (ids of control tokens), the architecture, the decoder and the stored tensors."""
    kind = architecture(header)
    config = kind.config(header)
    ids = {name: header.keys.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    hf = {f"{name}_token_id": i for name, i in ids.items() if type(i) is int and i < config.vocab_size}
    tensors = {
        name: replace(info, shape=info.shape[1:]) if name.endswith(VECTORS) and info.shape[:-1] == (1,) else info
        for name, info in header.tensors.items()
    }
    return hf, kind, config, kind.stored(stored_tensors(tensors, -kind.shift))
