"""Documents packed into one window do not influence each other anywhere in the model."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from onward import Batch, Tokens, Windows
from onward.data.windows import Packing
from onward.training import CrossEntropy

from support.decoders import DECODERS, LENGTH, decoder

Numbers = list[int]
MODELS = {name: decoder(config, torch.float64) for name, config in DECODERS.items()}
ROUNDING = 1e-12  # an expert's matrix products round differently if its number of tokens changes
LENGTHS = st.lists(st.integers(1, 7), min_size=2, max_size=6).filter(lambda lengths: sum(lengths) > LENGTH)


def window(documents: list[Numbers], pack: Packing = "documents") -> Batch:
    """The window that begins with the first document."""
    ids = np.concatenate(documents)[: LENGTH + 1]
    ends = np.cumsum([len(d) for d in documents])
    return Windows([Tokens.of(ids, ends[ends <= len(ids)])], LENGTH, seed=0, pack=pack).read([0])


def texts(lengths: list[int], seed: int = 0) -> list[Numbers]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, 13, length).tolist() for length in lengths]


@torch.inference_mode()
def moved(name: str, pack: Packing, lengths: list[int], changed: int) -> Tensor:
    """The maximum change of the logits at each position, (T,), when the tokens of one document change."""
    before, after = texts(lengths), texts(lengths)
    after[changed] = [(token + 1) % 13 for token in after[changed]]
    logits = [MODELS[name](b.tokens, b.positions) for b in (window(before, pack), window(after, pack))]
    return (logits[1] - logits[0])[0].abs().amax(-1)


@pytest.mark.parametrize("name", MODELS)
def test_changing_a_document_changes_no_logit_of_another(name: str) -> None:
    lengths = [3, 1, 4, 5]
    document = torch.arange(4).repeat_interleave(torch.tensor(lengths))[:LENGTH]
    for changed in range(4):
        found = moved(name, "documents", lengths, changed)
        assert found[document != changed].max() < ROUNDING
        assert found[document == changed].max() > 1e-3
    assert moved(name, "stream", lengths, 0)[3:].max() > 1e-3, "packed as one text, documents influence each other"


@torch.inference_mode()
# the RoPE scaling of "scaled turns" depends on the longest document
@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"scaled turns"}))
@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_loss_of_a_window_is_the_sum_over_its_documents(name: str, lengths: list[int], seed: int) -> None:
    model, documents = MODELS[name], texts(lengths, seed)
    total, room = CrossEntropy()(model, window(documents))[0], LENGTH + 1
    alone = torch.zeros((), dtype=torch.float64)
    for document in documents:
        ids = torch.tensor([document[:room]])
        room -= ids.size(1)
        if ids.size(1) > 1:
            alone += CrossEntropy()(model, Batch(ids[:, :-1], ids[:, 1:]))[0]
    torch.testing.assert_close(total, alone, rtol=ROUNDING, atol=100 * ROUNDING)
