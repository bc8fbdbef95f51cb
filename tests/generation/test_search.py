"""SearchRows: texts are prefilled in chunks into a growing cache, and continued token by token."""

from dataclasses import replace

import pytest
import torch

from onward.generation.cache.manager import CHUNK, STEP
from onward.generation.search.search import SearchRows

from support.decoders import DECODERS, assert_close, decoder, token_ids

NEW = 3
NAMES = "llama", "gemma2", "everything about scores", "deepseek", "scaled turns", "gated delta", "mamba2"


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_rows_of_a_search_have_the_hidden_states_of_a_call_without_a_cache(name: str) -> None:
    model = decoder(replace(DECODERS[name], context_length=CHUNK + NEW + 1))
    text = token_ids(model.config, 1, model.config.context_length)[0].tolist()
    assert STEP < CHUNK
    # cache growth after the prompt, and prompts of two chunks
    for lengths in (CHUNK - 1, 7), (STEP - 1, CHUNK + 1), (5, 4):
        rows = SearchRows(model, 2, CHUNK + NEW + 1)
        for new in range(NEW + 1):
            texts = [text[: length + new] for length in lengths]
            plain = [model.hidden(torch.tensor([one]))[0, -1] for one in texts]
            assert_close(rows.read(texts), torch.stack(plain))
