"""K-quants: sizes and perplexities of Onward's GGUF files, compared with llama.cpp's quantization of the same model.

    python -m benchmarks.kquants                     trains a small model on tinyshakespeare first, a few minutes
    python -m benchmarks.kquants --model FOLDER      another model; its row lengths must be multiples of 256

Perplexity is measured on the last tenth of the text. Onward computes it from the dequantized weights of each file, so
that only the rounding differs. With importance, both programs weight columns by the same mean squares of inputs,
measured on the first tenth. `divergence` is the mean KL divergence from the fp32 model, per token, times 1000.
llama.cpp's columns need llama-cpp-python.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import onward
from benchmarks.text import machine, shakespeare
from onward.checkpoint.gguf.convert import plan, write_model
from onward.checkpoint.gguf.importance import by_their_names, importance

DTYPES = {"q4_k_m": 15, "q5_k_m": 17, "q6_k": 18}  # type -> its number in llama.cpp
WINDOW = 128
SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda level, text, data: None)


def trained(tokens: Tensor, steps: int, vocabulary: int) -> onward.Decoder:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "d_model": 256,
        "n_layers": 4,
        "n_heads": 4,
        "n_kv_heads": 2,
        "d_ff": 768,
        "context_length": WINDOW,
    }
    model = onward.Decoder(onward.DecoderConfig(vocabulary, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for step in range(steps):
        starts = torch.randint(len(tokens) - WINDOW - 1, (8,)).tolist()
        batch = torch.stack([tokens[start : start + WINDOW + 1] for start in starts])
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    return model.eval()


@torch.inference_mode()
def logprobs(model: onward.Decoder, tokens: Tensor) -> Tensor:
    """The log-probabilities (N, T, V) in windows of the tokens."""
    windows = tokens[: len(tokens) // WINDOW * WINDOW].view(-1, WINDOW)
    return torch.cat([model(part).log_softmax(-1) for part in windows.split(8)])


def figures(found: Tensor, plain: Tensor, tokens: Tensor) -> tuple[float, float]:
    """The perplexity, and the mean KL divergence from the log-probabilities `plain`."""
    windows = tokens[: len(tokens) // WINDOW * WINDOW].view(-1, WINDOW)
    loss = F.nll_loss(found[:, :-1].flatten(0, 1), windows[:, 1:].flatten())
    return loss.exp().item(), (plain.exp() * (plain - found)).sum(-1).mean().item()


def quantized_there(source: Path, out: Path, dtype: str, columns: Mapping[str, Tensor]) -> None:
    """Quantize a file with llama.cpp, with `columns` as its importance matrix."""
    llama_cpp = importlib.import_module("llama_cpp")
    llama_cpp.llama_log_set(SILENT, None)
    options: Any = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread = DTYPES[dtype], 1
    arrays = {name.encode(): np.ascontiguousarray(own.numpy(), np.float32) for name, own in columns.items()}
    if arrays:
        rows = [(n, a.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), a.size) for n, a in arrays.items()]
        options.imatrix = (llama_cpp.llama_model_imatrix_data * (len(rows) + 1))(*rows, (None, None, 0))
    if llama_cpp.llama_model_quantize(bytes(source), bytes(out), ctypes.byref(options)):
        raise SystemExit(f"llama.cpp cannot quantize {source}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--windows", type=int, default=160, help="number of windows of the held-out text")
    options = parser.parse_args()
    text = "\n\n".join(shakespeare())
    tenth = len(text) // 10
    if options.model:
        lm = onward.load(options.model, torch.float32, "cpu")
    else:
        tokenizer = onward.train_tokenizer("bpe:1024", [text[:-tenth]])
        tokens = torch.tensor(tokenizer.encode(text[:-tenth]))
        lm = onward.LanguageModel(trained(tokens, options.steps, tokenizer.vocab_size), tokenizer)
    held = torch.tensor(lm.text().encode(text[-tenth:]))[: options.windows * WINDOW]
    measured = lm.text().encode(text[:tenth])
    plain = logprobs(lm.model, held)
    writers = ("onward", "llama.cpp") if importlib.util.find_spec("llama_cpp") else ("onward",)
    print(machine())
    print("| type | importance | file, MB | perplexity, Onward | llama.cpp | divergence, Onward | llama.cpp |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        onward.save(lm, folder / "f32.gguf", dtype="f32")
        size = (folder / "f32.gguf").stat().st_size
        print(f"| f32 | | {size / 1e6:.2f} | {figures(plain, plain, held)[0]:.3f} | | 0 | |", flush=True)
        squares = importance(lm.model, measured)
        for dtype in DTYPES:
            planned = plan(lm.model, lm.tokenizer, dtype.upper(), family=str(lm.hf.get("model_type", "")))
            columns = by_their_names(planned.architecture, lm.model, squares)
            for weighted in (False, True):
                tokens_of = measured if weighted else []
                found, sizes = [], []
                for writer in writers:
                    path = folder / f"{writer}.gguf"
                    if writer == "onward":
                        write_model(lm.model, planned, path, tokens=tokens_of)
                    else:
                        quantized_there(folder / "f32.gguf", path, dtype, columns if weighted else {})
                    model = onward.load(path, torch.float32, "cpu").model
                    found.append(figures(logprobs(model, held), plain, held))
                    sizes.append(path.stat().st_size / 1e6)
                words = [f"{p:.3f}" for p, _ in found], [f"{1000 * d:.2f}" for _, d in found]
                cells = [" | ".join([*own, *[""] * (2 - len(own))]) for own in words]
                shown = " / ".join(dict.fromkeys(f"{size:.2f}" for size in sizes))
                print(f"| {dtype} | {'yes' if weighted else 'no'} | {shown} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
