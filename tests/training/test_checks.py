"""Checks before training: correct setups pass, and a mutant for each check fails."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from onward import Batch, Decoder, DecoderConfig, Gated, RMSNorm, SelfAttention, Tokens, Windows
from onward.data import IGNORE_INDEX
from onward.training.presets import PRESETS, SHAPE
from onward.training.run.checks import CHUNK, Check, apart, causal, first_loss, shifted, start_checks
from onward.transforms import compile_blocks

from support.decoders import DECODERS, config, decoder, token_ids
from support.devices import device, on_device

RANDOM = np.random.default_rng(0)
TEXT = RANDOM.integers(0, 500, 200_000).astype(np.uint16)


def batch(pack: Any = "stream", context_length: int = 32, tokens: Tokens | None = None) -> Batch:
    """The first windows of a run."""
    tokens = tokens or Tokens.of(TEXT[:5000], np.arange(7, 5001, 7).astype(np.uint64))
    return Windows([tokens], context_length, seed=0, pack=pack).read(range(8)).to(device())


def fresh(**changes: Any) -> Decoder:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 500, "d_model": 64, "n_layers": 2, "n_heads": 4}
    return on_device(Decoder(DecoderConfig(**sizes | changes)))


# ---------------------------------------------------------------- targets


@pytest.mark.parametrize("pack", ["stream", "documents"])
def test_the_windows_of_a_run_have_the_next_token_as_target(pack: str) -> None:
    check = shifted(batch(pack))
    assert check.ok
    told = re.fullmatch(r"(\d+) of (\d+) targets are the next token", check.sentence)
    assert told
    assert told[1] == told[2]
    assert (int(told[2]) == 8 * 31) == (pack == "stream")  # the last token of a document has no target


MUTANTS: dict[str, Callable[[Batch], Batch]] = {
    "the token itself": lambda b: replace(b, targets=b.tokens),
    "two places on": lambda b: replace(b, targets=b.targets.roll(-1, 1)),
    "of another window": lambda b: replace(b, targets=b.targets.flip(0)),
    "one of them wrong": lambda b: replace(b, targets=b.targets + F.one_hot(torch.tensor(5), 32)),
    "none": lambda b: replace(b, targets=torch.full_like(b.targets, IGNORE_INDEX)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_other_targets_are_noticed(name: str) -> None:
    assert not shifted(MUTANTS[name](batch())).ok


# ---------------------------------------------------------------- causality


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_are_causal_and_a_leak_of_a_thousandth_is_noticed(name: str) -> None:
    model, ids = decoder(DECODERS[name]), token_ids(DECODERS[name], 1, 13)
    given = Batch(ids[:, :-1], ids[:, 1:])
    assert causal(model, given).ok
    model.blocks[0].register_forward_hook(lambda _, inputs, x: x + 1e-3 * x.roll(-1, 1))
    check = causal(model, given)
    assert not check.ok
    assert 0 < float(check.sentence.split(" at most ")[1].split()[0]) < 10


def without_mask(_: object, inputs: tuple[Tensor, Tensor, Tensor, object], output: Tensor) -> Tensor:
    """A forward hook for an Attend module."""
    q, k, v = (t.transpose(1, 2) for t in inputs[:3])
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("pack", ["stream", "documents"])
def test_a_fresh_model_without_a_mask_is_noticed(pack: str) -> None:
    model = fresh()
    assert causal(model, batch(pack)).ok
    model.blocks[1].attn.attend.register_forward_hook(without_mask)
    assert not causal(model, batch(pack)).ok


def test_checks_compile_nothing_and_leave_a_model_in_training() -> None:
    model, ran = fresh(dropout=0.5).train(), []
    compile_blocks(model, backend=lambda graph, _: ran.append(1) or graph.forward)
    state = torch.get_rng_state()
    assert causal(model, batch()).ok
    assert first_loss(model, batch()).ok
    assert model.training
    assert not ran
    assert torch.equal(torch.get_rng_state(), state)


# ---------------------------------------------------------------- first loss

SIZES = {
    "tiny": {**PRESETS["tiny"], **SHAPE},
    "mini": {**PRESETS["mini"], **SHAPE},
    "a vocabulary of two": {"vocab_size": 2},
    "deep": {"n_layers": 24},
    "wide": {"d_model": 4096, "n_layers": 1, "d_head": 16, "d_ff": 64},
    "scaled": {"logit_scale": 0.1, "embed_scale": 8.0, "norm": RMSNorm(eps=1e-6)},
}


@pytest.mark.parametrize("name", SIZES)
def test_first_loss_of_fresh_weights_passes_and_of_large_weights_fails(name: str) -> None:
    model = fresh(**SIZES[name])
    ids = torch.randint(model.config.vocab_size, (4, 101), generator=torch.Generator().manual_seed(1))
    given = Batch(ids[:, :-1], ids[:, 1:])
    check = first_loss(model, given)
    assert check.ok, check.sentence
    assert f"tokens is {math.log(model.config.vocab_size):.2f}" in check.sentence
    with torch.no_grad():
        model.head.weight.mul_(60 / model.config.logit_scale)
    assert not first_loss(model, given).ok


def test_a_model_initialized_ten_times_too_wide_is_noticed() -> None:
    model = fresh(mlp=Gated(), attention=SelfAttention())
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(10 if p.ndim > 1 else 1)
    assert not first_loss(model, batch()).ok


# ---------------------------------------------------------------- validation

BORDER = 190_000


def test_text_held_out_is_apart_and_text_from_inside_is_not() -> None:
    train, held = Tokens.of(TEXT[:BORDER]), Tokens.of(TEXT[BORDER:])
    assert apart([train], held) == Check(
        "validation", True, "0 of 32 passages of the validation text are also in the training text"
    )
    for first, last in (0, 1000), (70_000, 70_040), (BORDER - 5000, BORDER):
        check = apart([train], Tokens.of(TEXT[first:last]))
        assert not check.ok
        assert check.sentence.startswith(f"{min(32, last - first - 31)} of {min(32, last - first - 31)} passages")


def test_passages_are_found_in_any_source_and_across_chunks() -> None:
    text = RANDOM.integers(0, 500, 2 * CHUNK + 1000).astype(np.uint16)
    several = [Tokens.of(text[:BORDER].astype(np.uint32)), Tokens.of(text[BORDER:].astype(np.uint32))]
    for first in CHUNK - 15, BORDER, 2 * CHUNK - 10, len(text) - 40:
        assert apart(several, Tokens.of(text[first : first + 33])).sentence.startswith("2 of 2 passages")


def test_few_common_passages_pass_the_check_and_are_counted() -> None:
    for copied, ok in (1, True), (3, True), (8, False):
        held = TEXT[BORDER:].copy()
        length = 322 * (copied - 1) + 40  # the passages begin 321 or 322 tokens apart
        held[-length:] = TEXT[:length]
        check = apart([Tokens.of(TEXT[:BORDER])], Tokens.of(held))
        assert check.sentence.startswith(f"{copied} of 32 passages"), check.sentence
        assert check.ok == ok


def test_a_text_shorter_than_a_passage_is_searched_as_it_is() -> None:
    train = Tokens.of(TEXT[:BORDER])
    assert apart([train], Tokens.of(TEXT[BORDER : BORDER + 5])).ok
    assert not apart([train], Tokens.of(TEXT[50:55])).ok
    assert apart([Tokens.of(TEXT[:10])], Tokens.of(TEXT[BORDER:])).ok


def test_repetitive_text_is_searched_to_the_end() -> None:
    train = np.tile(np.array([1, 2, 1, 1], np.uint16), 100_000)
    train[-200:] = TEXT[:200]
    assert not apart([Tokens.of(train)], Tokens.of(TEXT[:200])).ok
    assert apart([Tokens.of(train)], Tokens.of(np.tile(np.array([1, 2, 1, 1, 5], np.uint16), 100))).ok


def test_of_a_large_memory_map_a_bounded_part_is_read(tmp_path: Path) -> None:
    read: list[int] = []

    class Told(np.memmap[Any, Any]):
        def __getitem__(self, places: Any) -> Any:
            read.append(len(found := np.asarray(super().__getitem__(places))))
            return found

    large = Told(tmp_path / "large.bin", np.uint16, "w+", shape=(1 << 31,))  # a hole of 4 GiB: no disk is used
    held = TEXT[:1000] + np.uint16(1)
    large[:1000] = held
    check = apart([Tokens.of(large), Tokens.of(TEXT)], Tokens.of(held), searched=1 << 22)
    assert check.sentence.startswith("32 of 32 passages")
    assert check.sentence.endswith("of which 0.2% was searched")
    assert 0.9 * (1 << 22) < sum(read) < 1.1 * (1 << 22)
    assert max(read) < 1.1 * CHUNK


# ---------------------------------------------------------------- all


@pytest.mark.parametrize("learned", [False, True])
def test_a_right_set_up_passes_all_checks(learned: bool) -> None:
    train, held = Tokens.of(TEXT[:BORDER]), Tokens.of(TEXT[BORDER:])
    names = [check.name for check in start_checks(fresh(), batch(), [train], held, fresh=not learned) if check.ok]
    assert names == ["targets", "causality", *([] if learned else ["first loss"]), "validation"]
    assert "validation" not in [check.name for check in start_checks(fresh(), batch(), [train], None, fresh=True)]


def test_one_token_of_context_is_no_mistake() -> None:
    given = batch(context_length=1)
    assert all(check.ok for check in start_checks(fresh(), given, [Tokens.of(TEXT)], None, fresh=True))
    assert causal(decoder(config()), Batch(token_ids(config(), 1, 2), token_ids(config(), 1, 2))).ok
