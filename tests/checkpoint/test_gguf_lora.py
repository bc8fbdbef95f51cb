"""LoRA adapters as GGUF files: llama.cpp computes the same results with the base and the adapter; an adapter that
llama.cpp would ignore in part is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from onward import LoRA, PiSSA, add_lora
from onward.base.errors import UserError
from onward.checkpoint.gguf.architectures import ARCHITECTURES
from onward.checkpoint.gguf.convert import plan, write_model
from onward.checkpoint.gguf.header import read_header
from onward.checkpoint.gguf.lora import write_adapter

from support.adapters import stirred
from support.decoders import decoder, token_ids
from support.gguf import COMPUTED, LENGTH
from support.gguf_layered import FOLDED
from support.llama_cpp import logprobs

BLOCKS = LoRA(rank=2, targets=("attn", "mlp"))
CASES = {
    "llama": LoRA(rank=2, targets=("attn", "mlp", "embed", "head")),  # rows of queries and keys are reordered
    "qwen3": replace(BLOCKS, alpha=7.0),
    "gpt2": BLOCKS,  # queries, keys and values are one tensor
    "gptneox": LoRA(rank=2, targets=("attn.q", "attn.v")),
    "chatglm": LoRA(rank=3, targets=("mlp.up", "mlp.down", "attn.out")),  # gate and up are one tensor
    "qwen3moe": LoRA(rank=2, targets=("attn", "mlp.gate", "mlp.up", "mlp.down")),
    "llama4": LoRA(rank=2, targets=("attn", "mlp.gate", "shared.up")),
    "gemma2": BLOCKS,
    "deepseek2": LoRA(rank=2, targets=("attn.out", "shared")),
    "mamba2": LoRA(rank=2, targets=("attn.out",)),
    "llama: biases, tied, wide heads": LoRA(rank=2, targets=("attn", "mlp"), rslora=True),
    "llama: YaRN": LoRA(rank=2, targets=("attn.q", "mlp.down"), ranks={"mlp.down": 4}, init=PiSSA()),
}


def family(case: str) -> str:
    return ARCHITECTURES[case.split(":")[0]].families[0]


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_llama_cpp_computes_the_same_with_an_adapter(case: str, tmp_path: Path) -> None:
    model = decoder(COMPUTED[case])
    write_model(model, plan(model, None, family=family(case)), tmp_path / "base.gguf")
    stirred(model, "own", lora=CASES[case])
    write_adapter(model, tmp_path / "own.gguf", "own", family(case))
    keys = read_header(tmp_path / "own.gguf").keys
    assert (keys["general.type"], keys["adapter.type"]) == ("adapter", "lora")
    [tokens] = token_ids(model.config, 1, LENGTH).tolist()
    wanted = model(torch.tensor([tokens]))[0].log_softmax(-1)
    got = logprobs(tmp_path / "base.gguf", tokens, LENGTH, lora_path=str(tmp_path / "own.gguf"))
    assert (logprobs(tmp_path / "base.gguf", tokens, LENGTH) - wanted).abs().max() > 0.1
    assert (got - wanted).abs().max() < (2e-2 if "gelu" in str(model.config.mlp) else 1e-4)


REFUSED = {
    "Cannot write an adapter with DoRA": ("llama", replace(BLOCKS, dora=True)),
    "the adapter of blocks.0.attn.kv_down.weight, which llama.cpp does not apply": (
        "deepseek2",
        LoRA(rank=2, targets=("attn.kv_down",)),
    ),
    "the adapter of an embedding that is also the head": (
        "llama: biases, tied, wide heads",
        LoRA(rank=2, targets=("embed",)),
    ),
    "the fully trained norm.weight": ("llama", replace(BLOCKS, full=("norm",))),
    "its weights differ from those of the model's GGUF file": ("falcon-h1", LoRA(rank=2, targets=("mlp",))),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_llama_cpp_would_leave_out_of_an_adapter_is_refused(message: str, tmp_path: Path) -> None:
    case, lora = REFUSED[message]
    model = decoder(FOLDED if case == "falcon-h1" else COMPUTED[case])
    add_lora(model, lora)
    with pytest.raises(UserError, match=message):
        write_adapter(model, tmp_path / "own.gguf", "default", family(case))
    assert not list(tmp_path.iterdir())
