"""Loading takes little more memory than the weights, measured in a fresh process."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from onward import Decoder, DecoderConfig, Experts, LayerNorm, Learned, Plain, SelfAttention
from onward.base.files import read_json
from onward.checkpoint.huggingface.save import save_model

PROGRAM = """
import re, sys
from pathlib import Path
import torch
from onward.checkpoint.load import load_model

def kilobytes(key):
    return int(re.search(rf"{key}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

torch.set_num_threads(1)
Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
before = kilobytes("VmRSS")
model, _ = load_model(Path(sys.argv[1]), eval(sys.argv[2]), quantize=eval(sys.argv[3]))
weights = [*model.parameters(), *model.buffers()]
for weight in weights:
    weight.aminmax()
print((kilobytes("VmHWM") - before) * 1024, sum(weight.nbytes for weight in weights))
"""
GPT2 = {
    "position": Learned(),
    "norm": LayerNorm(),
    "attention": SelfAttention(bias=True, out_bias=True),
    "mlp": Plain(act="gelu_tanh", bias=True),
    "tied": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"n_kv_heads": 4},
    "in shards": {"n_kv_heads": 4},
    "transposed and fused": GPT2,
    "experts stacked": {"mlp": Experts(count=16)},
}


def peak(shape: str, sizes: dict[str, Any], dtype: str, folder: Path, quantize: str = "None") -> float:
    """Peak of newly allocated memory, as a multiple of the bytes of the weights."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("needs /proc to measure")
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**sizes, **SHAPES[shape]))
    save_model(model, folder, shard_bytes=1e8 if shape == "in shards" else 1e12)
    assert (read_json(folder / "config.json")["model_type"] == "mixtral") == (shape == "experts stacked")
    del model
    words = [sys.executable, "-c", PROGRAM, str(folder), dtype, quantize]
    out = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    shutil.rmtree(folder)
    new, weights = map(int, out.split())
    return new / weights


SMALL = {"vocab_size": 4000, "d_model": 512, "n_layers": 12, "n_heads": 8}
LARGE = {"vocab_size": 32_000, "d_model": 2048, "n_layers": 4, "n_heads": 16}


@pytest.mark.long
@pytest.mark.parametrize("shape", ["plain", "transposed and fused"])
def test_small_model_is_never_in_memory_twice(shape: str, tmp_path: Path) -> None:
    assert peak(shape, SMALL, "None", tmp_path) < 1.25


@pytest.mark.long
def test_plain_weights_are_not_in_memory_beside_the_quantized_ones(tmp_path: Path) -> None:
    assert peak("plain", SMALL, "None", tmp_path, repr("int8")) < 1.6  # unquantized weights take 4 times as many bytes


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "changes", "dtype", "most"),
    [
        ("plain", {"d_ff": 5632}, "None", 1.05),
        ("in shards", {"d_ff": 5632}, "None", 1.05),
        ("transposed and fused", {}, "None", 1.15),
        ("experts stacked", {"d_ff": 512, "n_layers": 4}, "None", 1.15),
        ("plain", {"d_ff": 5632, "n_layers": 10}, "torch.bfloat16", 1.15),
        ("transposed and fused", {"n_layers": 9}, "torch.bfloat16", 1.15),
    ],
)
def test_loading_a_gigabyte_takes_at_most_1_15_of_it(
    shape: str, changes: dict[str, int], dtype: str, most: float, tmp_path: Path
) -> None:
    share = peak(shape, LARGE | changes, dtype, tmp_path)
    print(f"{shape}, {dtype}: {share:.3f} of the weights")
    assert share < most
