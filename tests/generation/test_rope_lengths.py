"""Rotary positions that depend on the length of a row: every token is predicted as in one call on all tokens so far."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig

import onward
from onward import Engine, KVCache, Request, Sampling
from onward.generation.cache.conversation import ConversationCache

from support.families.llama import SIZES
from support.families.phi3 import CASES
from support.parity import publish

DYNAMIC = LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 300.0, "factor": 3.0})
PHI3, PROMPT, NEW = CASES["longrope, long, half turns"], [3, 1, 4, 1, 5], 14


@torch.inference_mode()
@pytest.mark.parametrize("hf", [PHI3, DYNAMIC], ids=["longrope", "dynamic"])
def test_every_token_is_predicted_as_by_transformers_over_all_tokens_so_far(
    hf: PreTrainedConfig, tmp_path: Path
) -> None:
    theirs = publish(hf, tmp_path)
    model = onward.load(tmp_path).model
    original = 8 if hf is PHI3 else hf.max_position_embeddings
    prompt = (PROMPT * original)[: original - NEW // 2]
    length = original + NEW  # context length of Onward's model; transformers extends its own beyond the maximum
    model.config = onward.DecoderConfig(**{**vars(model.config), "context_length": length})
    requests = [Request(prompt, Sampling(temperature=0), new, num_logprobs=0) for new in (1, NEW)]
    for request in requests:
        cache = ConversationCache(KVCache(model.config, 1, length, length))
        engine = Engine(model, cache=cache)
        engine.add(request)
        engine.finish()
        for index, token in enumerate(request.logprobs):
            logits = theirs(torch.tensor([prompt + request.tokens[:index]])).logits[0, -1]
            assert request.tokens[index] == int(logits.argmax())
            assert token.logprob == pytest.approx(float(logits.log_softmax(-1).max()), abs=1e-4)
    if hf is PHI3:
        answer = theirs.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        assert requests[1].tokens == answer[0, len(prompt) :].tolist()
