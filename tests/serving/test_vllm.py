"""vLLM serves the folder of a model unchanged: dense, with int4 weights, and with a LoRA adapter.

vLLM pins the versions of its dependencies: $VLLM_PYTHON is the Python of an environment with vLLM.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import onward
from onward import LanguageModel, LoRA, use_adapter

from support.adapters import stirred

PYTHON = os.environ.get("VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else "")
CONFIG = onward.DecoderConfig(  # vLLM's attention on a CPU needs a head size of at least 32
    vocab_size=96, d_model=128, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=256, context_length=64
)
PROMPTS = [[5, 9, 20, 3], [31, 7], [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34]]
SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

folder, dtype, adapter, prompts, out = json.loads(sys.argv[1])
options = {"enable_lora": True, "max_lora_rank": 8} if adapter else {}
llm = LLM(folder, dtype=dtype, enforce_eager=True, max_model_len=64, skip_tokenizer_init=True, **options)
sampling = SamplingParams(temperature=0, max_tokens=24, logprobs=0, ignore_eos=True, detokenize=False)
lora = LoRARequest("adapter", 1, adapter) if adapter else None
replies = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, lora_request=lora)
answers = [reply.outputs[0] for reply in replies]
found = [[(token, probs[token].logprob) for token, probs in zip(one.token_ids, one.logprobs)] for one in answers]
json.dump(found, open(out, "w"))
"""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON, reason="needs vLLM: name the Python of its environment in $VLLM_PYTHON"),
]


def answers_of_vllm(folder: Path, dtype: str, adapter: Path | None, out: Path) -> list[list[tuple[int, float]]]:
    """The greedy tokens of vLLM after each prompt, with their log-probabilities."""
    given = json.dumps([str(folder), dtype, adapter and str(adapter), PROMPTS, str(out)])
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([PYTHON, "-c", SCRIPT, given], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[list[tuple[int, float]]] = json.loads(out.read_text())
    return found


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that does not always predict the same token."""
    torch.manual_seed(0)
    model = onward.Decoder(CONFIG).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    folder = tmp_path_factory.mktemp("vllm") / "dense"
    onward.save(LanguageModel(model, onward.train_tokenizer("char", ["The cat sat on the mat."])), folder)
    return folder


@pytest.mark.parametrize("kind", ["dense", "int4", "adapter"])
def test_vllm_continues_prompts_as_onward_does(kind: str, dense: Path, tmp_path: Path) -> None:
    folder, adapter, dtype, bound = dense, None, "float32", 1e-5
    if kind == "int4":
        folder, dtype, bound = tmp_path / "int4", "bfloat16", 0.05  # vLLM's kernel for int4 needs bf16
        onward.save(onward.load(dense, quantize="int4"), folder)
    if kind == "adapter":
        adapter, lm = tmp_path / "adapter", onward.load(dense)
        stirred(lm.model, "adapter", lora=LoRA(rank=8))
        onward.save_adapter(lm, adapter, dense, name="adapter")
    loaded: Any = onward.load(folder, getattr(torch, dtype), adapter_folder=[str(adapter)] if adapter else ())
    found = answers_of_vllm(folder, dtype, adapter, tmp_path / "found.json")
    assert [len(answer) for answer in found] == [24] * len(PROMPTS)
    for prompt, answer in zip(PROMPTS, found, strict=True):
        tokens = [token for token, _ in answer]
        with torch.no_grad(), use_adapter(loaded.model, "adapter" if adapter else ""):
            logits = loaded.model(torch.tensor([prompt + tokens]))[0, len(prompt) - 1 : -1]
        every = logits.float().log_softmax(-1)
        logprobs = every.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert [value for _, value in answer] == pytest.approx(logprobs.tolist(), abs=bound)
        assert logprobs.tolist() == pytest.approx(every.amax(-1).tolist(), abs=bound), "each token is the likeliest"
