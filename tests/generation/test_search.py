"""The rows of a search: prompts are read in chunks, into a cache that grows."""

from dataclasses import replace

import pytest
import torch

from onward.generation.cache.manager import CHUNK, STEP
from onward.generation.search.search import prefill

from support.decoders import DECODERS, assert_close, decoder, token_ids

NEW = 3
NAMES = "llama", "gemma2", "everything about scores", "deepseek", "scaled turns"


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_rows_of_a_search_have_the_hidden_states_of_a_call_without_a_cache(name: str) -> None:
    model = decoder(replace(DECODERS[name], context_length=CHUNK + NEW + 1))
    text = token_ids(model.config, 1, model.config.context_length)[0].tolist()
    assert STEP < CHUNK
    for lengths in (CHUNK - 1, 7), (STEP - 1, CHUNK + 1):  # the cache grows after the prompt; two chunks
        search, states = prefill(model, [text[:length] for length in lengths], NEW, rows=2)
        for i in range(NEW):
            starts = [length + i for length in lengths]
            for pieces, hidden in zip(states, search.forward([[text[start]] for start in starts], starts)):
                pieces.append(hidden)
        for length, pieces in zip(lengths, states):
            assert_close(torch.cat(pieces), model.hidden(torch.tensor([text[: length + NEW]]))[0])
