"""References for `verify`: the same model computed by transformers or llama.cpp, as logits and residual streams.

Shapes: B rows, T tokens, D d_model, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.checkpoint.gguf.header import read_header
from onward.model.decoder import Decoder

F32 = 0  # llama.cpp's id of fp32, the dtype of keys and values
STREAM, LAST = "l_out-", "result_norm"  # llama.cpp's names of the outputs of a block and of the final norm
ROUNDING = {"F32": 2e-5, "F16": 1e-2, "BF16": 5e-2, "Q8_0": 1e-1}  # relative to the largest logit, by weight type
QUANTIZED = 0.5  # tolerance for all other types


@dataclass(frozen=True)
class Computed:
    """The logits and residual streams that a reference program, such as transformers, computes for token ids (B, T)."""

    logits: Tensor  # (B, T, V)
    streams: dict[int, Tensor]  # (B, T, D), by the number of preceding blocks; the last one is after the final norm


@dataclass(frozen=True)
class Reference:
    """Another program that computes the same model from token ids (B, T)."""

    name: str
    compute: Callable[[Tensor], Computed]
    tolerance: float = 0.0  # rounding error of the reference, as a share of the largest logit


def transformers_reference(folder: Path, model: Decoder, name: str) -> Reference:
    """The model in `folder`, computed by transformers with the dtype and on the device of `model`; code in the folder
    is not run."""
    try:
        from transformers import AutoModelForCausalLM, logging
    except ImportError:
        raise UserError("--against transformers needs transformers: pip install transformers") from None
    logging.disable_progress_bar()
    try:
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype, trust_remote_code=False)
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"transformers cannot load {name} ({reason}): verify it without --against") from None
    return from_transformers(theirs.to(model.device).eval())


def from_transformers(theirs: Any) -> Reference:
    def compute(tokens: Tensor) -> Computed:
        result = theirs(tokens, output_hidden_states=True)
        return Computed(result.logits, dict(enumerate(result.hidden_states)))

    return Reference("transformers", compute)


def llama_cpp_reference(path: Path, model: Decoder) -> Reference:
    """A GGUF file of the same model, computed by llama.cpp."""
    if not path.is_file():
        raise UserError(f"there is no file {path}: make it with onward convert MODEL {path}")
    try:
        library = import_module("llama_cpp")
    except ImportError:
        raise UserError(f"--against {path} needs llama.cpp: pip install llama-cpp-python") from None
    types = [tensor.type.name for tensor in read_header(path).tensors.values() if len(tensor.shape) > 1]
    tolerance = ROUNDING.get(max(types, key=types.count, default="F32"), QUANTIZED)
    return Reference("llama.cpp", lambda tokens: llama_cpp_computes(library, path, tokens, model), tolerance)


def llama_cpp_computes(library: Any, path: Path, tokens: Tensor, model: Decoder) -> Computed:
    """Compute each row of token ids (B, T) in its own llama.cpp context, with keys and values in fp32; `library` is the
    module llama_cpp."""
    rows = [read_row(library, path, row.tolist(), model) for row in tokens]
    names = rows[0][1].keys()
    return Computed(
        torch.stack([logits for logits, _ in rows]).to(tokens.device),
        {i: torch.stack([streams[i] for _, streams in rows]).to(tokens.device) for i in sorted(names)},
    )


def read_row(library: Any, path: Path, row: list[int], model: Decoder) -> tuple[Tensor, dict[int, Tensor]]:
    """Logits (T, V) of one text, and its residual streams (T, D) by the number of preceding blocks."""
    streams: dict[int, Tensor] = {}
    ggml = import_module("llama_cpp._ggml").libggml
    width, blocks = model.config.d_model, model.config.n_layers
    ggml.ggml_get_name.restype = ctypes.c_char_p
    ggml.ggml_get_name.argtypes = [ctypes.c_void_p]
    ggml.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]

    def see(tensor: int, ask: bool, _: object) -> bool:
        name = ggml.ggml_get_name(tensor).decode()
        block = blocks if name == LAST else int(name[len(STREAM) :]) + 1 if name.startswith(STREAM) else 0
        if not block or (name != LAST and block == blocks):
            return not ask
        if not ask:
            streams[block] = torch.empty(len(row), width)
            ggml.ggml_backend_tensor_get(tensor, streams[block].data_ptr(), 0, streams[block].nbytes)
        return True

    callback = library.llama_cpp.ggml_backend_sched_eval_callback(see)
    with opened(library, path, model, len(row), callback) as context:
        batch = library.llama_batch_init(len(row), 0, 1)
        try:
            batch.n_tokens = len(row)
            for i, token in enumerate(row):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, True
                batch.seq_id[i][0] = 0
            if library.llama_decode(context, batch):
                raise UserError(f"llama.cpp cannot compute {path}: verify the model without --against")
            logits = torch.empty(len(row), model.config.vocab_size)
            ctypes.memmove(logits.data_ptr(), library.llama_get_logits(context), logits.nbytes)
        finally:
            library.llama_batch_free(batch)
    return logits, streams


@contextmanager
def opened(library: Any, path: Path, model: Decoder, length: int, callback: Any) -> Iterator[Any]:
    """A llama.cpp context for a text of `length` tokens; llama.cpp calls `callback` with every tensor."""
    quiet = library.llama_log_callback(lambda level, text, data: None)
    library.llama_log_set(quiet, None)
    loaded = library.llama_model_load_from_file(str(path).encode(), library.llama_model_default_params())
    if not loaded:
        raise UserError(f"llama.cpp cannot load {path}: verify the model without --against")
    try:
        theirs = library.llama_vocab_n_tokens(library.llama_model_get_vocab(loaded)), library.llama_model_n_embd(loaded)
        if theirs != (ours := (model.config.vocab_size, model.config.d_model)):
            raise UserError(
                f"Cannot compare with {path}, which contains another model: its vocabulary and width are "
                f"{theirs} instead of {ours}"
            )
        options = library.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = length
        options.type_k = options.type_v = F32
        options.flash_attn_type, options.cb_eval = 0, callback
        context = library.llama_init_from_model(loaded, options)
        try:
            yield context
        finally:
            library.llama_free(context)
    finally:
        library.llama_model_free(loaded)
