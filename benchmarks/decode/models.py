"""The models that are measured: random weights, as a Hugging Face folder and as GGUF files for llama.cpp."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

import onward

SEED = 0
CONFIG = onward.DecoderConfig(  # 124,668,672 parameters
    vocab_size=32_000, d_model=768, n_layers=12, n_heads=12, n_kv_heads=4, d_ff=2048, context_length=8320
)


@dataclass(frozen=True)
class Precision:
    """A precision: how Onward and transformers load the model, and the type of its matrices in a GGUF file."""

    dtype: torch.dtype
    gguf: str
    quantize: Literal["int8", "int4"] | None = None  # argument of onward.load; None: weights in `dtype`


PRECISIONS = {
    "f32": Precision(torch.float32, "F32"),
    "bf16": Precision(torch.bfloat16, "BF16"),
    "int8": Precision(torch.bfloat16, "Q8_0", "int8"),
    "int4": Precision(torch.bfloat16, "Q4_0", "int4"),
}


@dataclass(frozen=True)
class Sizes:
    """The benchmark's settings: the model, and the numbers of tokens, rows and requests."""

    name: str = "full"
    config: onward.DecoderConfig = CONFIG
    prompt: int = 128
    new: int = 128
    prefill: tuple[int, ...] = (16, 128, 512, 2048)  # tokens of a prompt
    requests_at_once: tuple[int, ...] = (1, 4)  # numbers of requests that are prefilled together
    batch: int = 16
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    rows_prompt: int = 16
    requests: int = 64
    request_prompt: tuple[int, int] = (16, 192)  # minimum and maximum number of tokens of a prompt
    request_new: tuple[int, int] = (16, 64)
    slots: tuple[int, int] = (256, 4096)
    present: int = 200  # tokens in the cache, in the middle of decoding `present_new` tokens
    present_new: int = 48
    context: int = 8000
    context_new: int = 32
    uncached: int = 512
    draft_layers: int = 2
    target_layers: int = 48
    read: int = 1 << 29  # bytes of an array that is larger than most processors' caches


TINY = Sizes(
    "tiny",
    onward.DecoderConfig(vocab_size=96, d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=96, context_length=256),
    prompt=8,
    new=4,
    prefill=(4, 8),
    requests_at_once=(1, 2),
    batch=3,
    rows=(1, 2),
    rows_prompt=4,
    requests=3,
    request_prompt=(2, 6),
    request_new=(2, 4),
    slots=(32, 64),
    present=16,
    present_new=8,
    context=40,
    context_new=4,
    uncached=8,
    draft_layers=1,
    target_layers=2,
    read=1 << 20,
)
SIZES = {sizes.name: sizes for sizes in (Sizes(), TINY)}


def random_model(config: onward.DecoderConfig) -> onward.Decoder:
    torch.manual_seed(SEED)
    return onward.Decoder(config).eval()


def prompt(config: onward.DecoderConfig, length: int, seed: int = SEED) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (length,), generator=generator).tolist()


@dataclass(frozen=True)
class Files:
    """A folder with the files of one model, each written when it is first asked for."""

    root: Path
    config: onward.DecoderConfig
    make: Callable[[onward.DecoderConfig], onward.Decoder] = random_model

    def folder(self, dtype: torch.dtype) -> Path:
        folder = self.root / str(dtype).removeprefix("torch.")
        if not folder.exists():
            onward.save(onward.LanguageModel(self.make(self.config).to(dtype)), folder)
        return folder

    def gguf(self, kind: str) -> Path:
        """The model as a GGUF file whose matrices have this type; needs the `gguf` library."""
        path = self.root / f"{kind}.gguf"
        if not path.exists():
            self.root.mkdir(parents=True, exist_ok=True)
            write_gguf(self.make(self.config), path, kind)
        return path


def write_gguf(model: onward.Decoder, path: Path, kind: str) -> None:
    """Write a Llama-shaped decoder as a GGUF file without a tokenizer; norms stay in fp32, as llama.cpp needs them."""
    gguf, c = importlib.import_module("gguf"), model.config
    rope, norm = model.config.position, model.config.norm
    assert isinstance(rope, onward.Rotary), "not the positions of a Llama"
    assert isinstance(norm, onward.RMSNorm), "not the norm of a Llama"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(c.context_length)
    writer.add_embedding_length(c.d_model)
    writer.add_block_count(c.n_layers)
    writer.add_feed_forward_length(c.d_ff)
    writer.add_head_count(c.n_heads)
    writer.add_head_count_kv(c.n_kv_heads)
    writer.add_rope_dimension_count(c.d_head)
    writer.add_rope_freq_base(rope.theta)
    writer.add_layer_norm_rms_eps(norm.eps)
    writer.add_vocab_size(c.vocab_size)
    writer.add_tokenizer_model("none")
    matrices = gguf.GGMLQuantizationType[kind]
    for name, tensor in model.named_parameters():  # a tied head is not listed separately
        array = gguf_tensor(name, tensor.detach(), c)
        type_of = matrices if array.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(array, type_of), raw_dtype=type_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


GGUF_NAMES = {
    "embed": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "attn_norm": "attn_norm",
    "attn.q": "attn_q",
    "attn.k": "attn_k",
    "attn.v": "attn_v",
    "attn.out": "attn_output",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
}


def gguf_name(name: str) -> str:
    """The name of a Llama-shaped decoder's parameter in a GGUF file."""
    module = name.removesuffix(".weight")
    if not module.startswith("blocks."):
        return f"{GGUF_NAMES[module]}.weight"
    _, layer, rest = module.split(".", 2)
    return f"blk.{layer}.{GGUF_NAMES[rest]}.weight"


def gguf_tensor(name: str, tensor: Tensor, config: onward.DecoderConfig) -> np.ndarray:
    """The values of a parameter in a GGUF file. llama.cpp rotates neighboring components of queries and keys, Onward
    components that are half a head apart, so the rows of q and k are permuted."""
    if name.endswith(("attn.q.weight", "attn.k.weight")):
        tensor = tensor.unflatten(0, (-1, 2, config.d_head // 2)).transpose(1, 2).flatten(0, 2)
    return tensor.contiguous().numpy()
