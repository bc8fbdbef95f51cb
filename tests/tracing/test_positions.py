"""Edits apply to positions in the text: with a cache, over several calls and among other requests, the result equals
that of one call with the complete text."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import onward
from onward import BlockManager, CacheManager, Decoder, Engine, KVCache, PagedKVCache, Request, Sampling, UserError
from onward.families import read
from onward.generation import LookupDraft, ModelDraft
from onward.model.rows import Row, labeled
from onward.tracing import add, clamp, mean_of, replace, scale, zero
from onward.tracing.sites import activations

from support.decoders import DECODERS, assert_close, decoder, token_ids
from support.families import CASES, NAMES
from support.ways import feed, new_cache

LENGTH = 10
GREEDY = Sampling(temperature=0)
FIRST = {name: next(hf for case, hf in CASES.items() if case.startswith(f"{name}: ")) for name in NAMES}
FEW = (
    *("bloom", "cohere", "deepseek_v2", "deepseek_v3", "gemma2", "gpt2", "gpt_neo", "gpt_oss", "gptj", "llama"),
    *("mixtral", "mpt", "olmo2", "opt", "qwen2_moe"),
)


def in_pieces(model: Decoder, tokens: Tensor, kind: str) -> Tensor:
    """The logits of two rows of a cache that are at different positions: prompts in chunks of 5 and 3 tokens, then one
    token of each row at a time, then the rest of the second row."""
    manager, logits = new_cache(model, 5, kind), [list[Tensor](), list[Tensor]()]
    manager.cache.rope_length.fill_(LENGTH)
    logits[0].append(feed(model, manager, tokens[:1, :5], 0))
    logits[1].append(feed(model, manager, tokens[1:, :3], 0, row=1))
    for step in range(LENGTH - 5):
        pair = feed(
            model, manager, torch.stack([tokens[0, 5 + step], tokens[1, 3 + step]])[:, None], [5 + step, 3 + step]
        )
        for row in range(2):
            logits[row].append(pair[row : row + 1])
    logits[1].append(feed(model, manager, tokens[1:, -2:], LENGTH - 2, row=1))
    return torch.cat([torch.cat(row, 1) for row in logits])


def changes_of(model: Decoder, tokens: Tensor) -> Iterator[tuple[str, Any]]:
    """Edits of every editable activation, and of one of its heads, units or experts, with every kind of change."""
    with onward.trace(model) as t:
        model(tokens)
    for name, activation in activations(model).items():
        if not activation.editable:
            continue
        for one in (None, activation.parts - 1) if activation.parts else (None,):
            key, x, keys = name if one is None else f"{name}.{one}", t[name].detach()[:1], "S" in activation.shape
            x = x.nan_to_num(neginf=-5.0)  # for a query with only masked keys, -inf would give NaN
            if one is not None:  # the experts of a token are in the order of its choices
                x = x.select(2, 0) if name.endswith(".experts") else x.select(activation.axis or 0, one)
            yield key, zero
            yield key, scale(1.5)
            yield key, scale(-1.0, at=[1, 4, 7])
            yield key, clamp(-0.1, 0.1)
            yield key, add(0.7, at=slice(2, None, 3))
            yield key, replace(0.3, at=6)
            yield key, 1.1 * x.flip(1)
            yield key, replace(x.roll(1, 1), at=slice(3, 8))
            if not keys:
                yield key, replace(x[:, :4])
                yield key, add(0.3 * x[0, 0])
                yield key, mean_of(tokens)
            if not keys and not name.endswith(".experts"):
                yield key, mean_of(t)


@pytest.mark.fuzzer
@pytest.mark.parametrize(
    ("name", "runs"), [*((name, 2) for name in FEW), *(pytest.param(n, 1000, marks=pytest.mark.long) for n in NAMES)]
)
@torch.no_grad()
def test_edits_with_a_cache_are_those_of_the_whole_text(name: str, runs: int) -> None:
    config = read(FIRST[name].to_dict())[1]
    model, tokens = decoder(config, torch.float64), token_ids(config, 2, LENGTH)
    cases: list[tuple[str, Any]] = list(changes_of(model, tokens))
    random.Random(name).shuffle(cases)
    cases.sort(key=lambda case: ".shares" in case[0])  # edited shares change the number of experts per token
    for run in range(min(runs, len(cases) // 4)):  # four edits at a time
        kind = ("contiguous", "paged")[run % 2]
        with onward.edit(model, dict(cases[4 * run : 4 * run + 4])):
            whole, pieces = model(tokens), in_pieces(model, tokens, kind)
        assert_close(pieces, whole, 1e-9)


def paged(model: Decoder) -> CacheManager:
    """A paged cache with memory for fewer than two complete requests."""
    return BlockManager(PagedKVCache(model.config, 3, 12, 4, blocks=8, block_size=2, dtype=model.dtype))


def small_chunks(model: Decoder) -> CacheManager:
    return CacheManager(KVCache(model.config, 3, 12, 3, dtype=model.dtype))


WAYS: dict[str, Callable[[Decoder], dict[str, Any]]] = {
    "prompts in chunks": lambda model: {"cache": small_chunks(model)},
    "preemption": lambda model: {"cache": paged(model)},
    "prompt lookup": lambda model: {"draft": LookupDraft(2, 1)},
    "a draft": lambda model: {"draft": ModelDraft(model, 2)},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore::onward.tracing.listening.Uncompiled")
@torch.no_grad()
def test_answers_under_edits_are_those_of_the_whole_text(way: str) -> None:
    model = decoder(DECODERS["gemma2"], torch.float64)
    with onward.trace(model, "blocks.1.mlp.out") as t:
        model(token_ids(model.config))
    forced = torch.zeros(13)
    forced[7] = 1e3
    changes: dict[str, Any] = {
        "blocks.0": add(torch.linspace(-2, 2, 16), at=[1, 4, 7]),
        "blocks.1.attn.heads.2": mean_of(token_ids(model.config)),
        "blocks.1.mlp.out": replace(t["blocks.1.mlp.out"][:1], at=slice(2, 6)),
        "blocks.2.attn.weights.1": scale(0.5, at=slice(3, None, 2)),
        "logits": add(forced, at=8),
    }
    engine = Engine(model, rows=3, **WAYS[way](model))
    prompts = [[1, 2, 3, 4, 5], [6, 7], [1, 2, 3, 4, 5], [3, 1, 4, 1, 5, 9]]
    with onward.edit(model, changes):
        requests = [engine.add(Request(prompt, GREEDY, 6)) for prompt in prompts]
        list(engine.run())
        for request in requests:
            assert len(request.tokens) == 6
            logits = model(torch.tensor([[*request.prompt, *request.tokens]]))[0]
            assert request.tokens == logits[len(request.prompt) - 1 : -1].argmax(-1).tolist()
            if len(request.prompt) == 5:
                assert request.tokens[9 - 5] == 7  # predicted by the logits at position 8


@pytest.mark.filterwarnings("ignore::onward.tracing.listening.Uncompiled")
@torch.no_grad()
def test_positions_of_an_edit_stay_those_of_the_text_when_the_context_slides() -> None:
    model = decoder(DECODERS["llama"], torch.float64)  # a context of 12
    engine, prompt = Engine(model, slide=True), [1, 2, 3, 4, 5, 6, 7, 8]
    with onward.edit(model, {"blocks.0": add(3 * torch.randn(16), at=[3, 9, 13, 15])}):
        request = engine.add(Request(prompt, GREEDY, 12))
        list(engine.run())
        text, start = list(prompt), 0
        while len(text) < 20:
            start += len(text) - start - 6 if len(text) - start > 12 else 0
            context = text[start:]
            with labeled([Row(request, len(context), 0, start)]):
                text.append(int(model(torch.tensor([context]))[0, -1].argmax()))
    assert request.start == start > 0
    assert request.tokens == text[8:]


def test_masked_scores_and_weights_stay_masked_under_every_change() -> None:
    model, tokens = decoder(DECODERS["gpt-oss"]), token_ids(DECODERS["gpt-oss"])
    hidden = torch.ones(12, 12).triu(1).bool()
    for site, masked in ("masked_scores", -torch.inf), ("weights", 0.0):
        name = f"blocks.1.attn.{site}"
        for change in zero, add(1.0), scale(0.0), clamp(-0.1, 0.1), replace(0.2), torch.ones(12, 12):
            with onward.edit(model, {name: change}), onward.trace(model, name) as t:
                model(tokens)
            assert t[name][..., hidden].eq(masked).all()
            assert t[name].isfinite().all() or site == "masked_scores"


def test_a_mean_is_that_of_the_texts_given_and_not_of_the_call() -> None:
    model, texts = decoder(DECODERS["gpt-oss"], torch.float64), token_ids(DECODERS["gpt-oss"], 3)
    names = "blocks.0.mlp.out", "blocks.1.attn.heads.2", "blocks.1.mlp.experts.3", "blocks.1.mlp.router.choices"
    with torch.no_grad(), onward.trace(model, *names) as t:
        for text in texts:
            model(text[None])
    every = {name: torch.cat([call[name] for call in t.calls]).flatten(0, 1) for name in names}
    uses = (every[names[3]] == 3).any(-1)  # the mean of an expert is over its own tokens
    wanted = {names[0]: every[names[0]].mean(0), names[1]: every[names[1]].mean(0)}
    wanted[names[2]] = every[names[2]][uses].mean(0)
    for source in t, texts, texts.tolist():
        for name in names[:3]:
            with onward.edit(model, {name: mean_of(source)}), onward.trace(model, name) as edited:
                model(texts[:1, :1])
            x = edited[name][0, 0]
            assert torch.equal(x, torch.zeros_like(x)) or torch.allclose(x, wanted[name], atol=1e-12)


def test_a_mean_of_requests_leaves_out_their_padding() -> None:
    model = decoder(DECODERS["llama"], torch.float64)
    engine, name = Engine(model, rows=2), "blocks.1.mlp.out"
    requests = [engine.add(Request(prompt, GREEDY, 1)) for prompt in ([1, 2, 3, 4, 5], [6, 7, 8, 9])]
    with onward.trace(model, name) as t:
        list(engine.run())
    vectors = torch.cat([step[name] for request in requests for step in t.of(request)])
    assert len(vectors) == 9
    assert_close(t.mean(name), vectors.mean(0), 1e-12)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda m: onward.edit(m, {"blocks.0": add(1.0, at=-1)}), "at -1: count up from 0"),
        (lambda m: onward.edit(m, {"blocks.0": scale(2, at=slice(-3, None))}), r"at slice\(-3, None, None\)"),
        (
            lambda m: onward.edit(m, {"blocks.0": mean_of(onward_trace(m, "blocks.1"))}),
            r"blocks\.0\.out was not traced",
        ),
        (
            lambda m: onward.edit(m, {"blocks.0.attn.weights": mean_of([[1]])}),
            r"because it is \(B, 4, T, S\): trace an",
        ),
    ],
)
def test_positions_and_means_that_do_not_exist_are_one_sentence(use: Any, message: str) -> None:
    with pytest.raises(UserError, match=message), use(decoder(DECODERS["llama"])):
        pass


def onward_trace(model: Decoder, name: str) -> Any:
    with onward.trace(model, name) as t:
        model(torch.tensor([[1, 2]]))
    return t


def test_a_value_for_several_texts_is_refused_in_an_engine() -> None:
    model = decoder(DECODERS["llama"])
    engine = Engine(model)
    request = engine.add(Request([1, 2], GREEDY, 2))
    with (
        pytest.raises(UserError, match="for 2 texts in an engine: give one"),
        onward.edit(model, {"blocks.0": torch.zeros(2, 1, 16)}),
    ):
        list(engine.run())
    assert not request.done


def test_logits_of_chosen_tokens_have_positions_only_in_an_engine() -> None:
    model, tokens = decoder(DECODERS["llama"]), token_ids(DECODERS["llama"])
    hidden = model.hidden(tokens)
    with onward.edit(model, {"logits": add(1.0, at=2)}), pytest.raises(UserError, match="unknown in this call"):
        model.logits(hidden[:, -1])
