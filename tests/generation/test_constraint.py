"""Answers have the form that was asked for, whatever the model would rather say."""

import json
import re
import sys
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from conftest import SHARED
from hypothesis import given, settings
from hypothesis import strategies as st

import onward
from onward.errors import UserError
from onward.generation.constraint import TextConstraint, constraint
from onward.generation.sampling import Sampling
from onward.language_model import LanguageModel
from onward.model.config import DecoderConfig
from onward.model.decoder import Decoder
from onward.text.tokenizer import Tokenizer, train_tokenizer

TEXT = 'abc é 猫 🐈 0123456789 {"name": [true, false, null], "b": -1.5e+2}\n \\u "ab": "ba"}' * 3
SPECS = ["char", "byte", "bpe:330", "gpt2"]


@lru_cache
def lm(spec: str) -> LanguageModel:
    """A model that knows nothing, with one of the tokenizers."""
    folder = SHARED / "gpt2-tokenizer"
    if spec == "gpt2" and not folder.is_dir():
        pytest.skip(f"needs the data in {SHARED}")
    tokenizer = Tokenizer.load(folder) if spec == "gpt2" else train_tokenizer(spec, [TEXT])
    torch.manual_seed(0)
    sizes = {"d_model": 8, "n_layers": 1, "n_heads": 1, "n_kv_heads": 1, "context_length": 512}
    return LanguageModel(Decoder(DecoderConfig(vocab_size=tokenizer.vocab_size + 3, **sizes)).eval(), tokenizer)  # type: ignore[arg-type]


def form(spec: str, **how: Any) -> TextConstraint:
    model = lm(spec)
    found = constraint(model.text(), model.config.vocab_size, model.end_ids, Sampling(**how))
    assert found is not None
    return found


def repeated(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(inner, st.sampled_from(["?", "*", "+", "{2}", "{0,2}", "{1,3}"])).map(lambda t: f"({t[0]}){t[1]}")


def joined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(inner, min_size=1, max_size=3).map("".join) | st.lists(inner, min_size=2, max_size=3).map("|".join)


LETTERS = ["a", "b", "é", "猫", "🐈", " ", '"', r"\\", "0"]
REGEX = st.recursive(
    st.sampled_from([*LETTERS, "[abé猫]", "[^a]", "[0-9]", ".", r"\n"]), lambda s: repeated(s) | joined(s), max_leaves=6
)


@pytest.mark.parametrize("spec", SPECS)
@given(pattern=REGEX, temperature=st.sampled_from([0.0, 1.0, 20.0]), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_answers_match_the_regular_expression(spec: str, pattern: str, temperature: float, seed: int) -> None:
    (answers,) = lm(spec).complete("ab", 60, regex=pattern, temperature=temperature, seed=seed, n=3)
    for answer in answers:
        if answer.finish == "stop":
            assert re.fullmatch(pattern, answer.text), (pattern, answer.text)
        else:
            assert len(answer.tokens) == 60
            assert re.search("[*+]", pattern)  # nothing else can go on for so long


@pytest.mark.parametrize("spec", SPECS)
@given(language=st.sets(st.text("abé猫🐈", max_size=4), min_size=1, max_size=4), data=st.data())
@settings(max_examples=25)
def test_exactly_the_tokens_may_come_that_lead_to_an_answer(spec: str, language: set[str], data: st.DataObject) -> None:
    model = lm(spec)
    tokens = [model.text().token_bytes(i) for i in range(model.config.vocab_size)]
    whole, said = [text.encode() for text in language], b""
    if spec == "char":  # each character is one token
        whole_at = {w[: len("".join(c).encode())] for w in whole for c in [w.decode()[:n] for n in range(9)]}
    state = form(spec, regex="|".join(language) or "()") if any(language) else None
    while state is not None:
        may = {i for i, t in enumerate(tokens) if t and any(w.startswith(said + t) for w in whole)}
        if spec == "char":
            may = {i for i in may if said + tokens[i] in whole_at}
        ends = set(model.end_ids) if said in whole else set()
        assert set(state.allowed().nonzero().flatten().tolist()) == may | ends
        if not may:
            return
        token = data.draw(st.sampled_from(sorted(may)))
        said += tokens[token]
        assert state.accept(token) == any(w.startswith(said) and w != said for w in whole)
