"""Every decoder is causal, and every way of running it gives the logits of the plain run."""

import json
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from typing import Any, Literal, get_args, get_origin

import pytest
import torch

from onward import DecoderConfig, Experts, KVCache, Routing, Scaling
from onward.base import fields
from onward.config import decoder as parts
from onward.config.decoder import at
from onward.config.feedforward_parts import ActivationName
from onward.model.layer_cache import LayerCache
from onward.model.segments import Segments

from support.decoders import DECODERS, LENGTH, decoder, token_ids
from support.ways import WAYS, assert_equals_the_plain_run

TABLE = "tests/support/decoders.py"
every_decoder = pytest.mark.parametrize("config", DECODERS.values(), ids=DECODERS.keys())


def test_the_decoders_use_every_part_and_every_option() -> None:
    used: dict[tuple[str, str], set[Any]] = {}

    def visit(value: Any) -> None:
        if isinstance(value, tuple):
            for v in value:
                visit(v)
        elif is_dataclass(value):
            used.setdefault((type(value).__name__, ""), set())
            for name in fields.hints(type(value)):
                used.setdefault((type(value).__name__, name), set()).add(getattr(value, name))
                visit(getattr(value, name))

    for config in DECODERS.values():
        visit(config)
    slots: list[Any] = [parts.Position, parts.Attention, parts.FeedForward, parts.Norm, parts.Block, Routing, Scaling]
    classes = [part for slot in slots for part in slot.kinds.values()] + [DecoderConfig]
    # parts of families have their own tests
    classes = [cls for cls in classes if cls.__module__.startswith("onward.config.")]
    for cls in classes:
        assert (cls.__name__, "") in used, f"no decoder has {cls.__name__}: add one to {TABLE}"
        hints = fields.hints(cls)
        for field in fields_of(cls):
            values = used[cls.__name__, field.name]
            if field.name in ("vocab_size", "d_model", "context_length", "dropout", "compute"):
                continue  # sizes are the same in all decoders; the other fields have their own tests
            if get_origin(hints[field.name]) is Literal and cls not in (parts.Plain, parts.Gated, Experts):
                assert values == set(get_args(hints[field.name])), f"{cls.__name__}.{field.name}"
            assert values - {field.default}, (
                f"{cls.__name__}.{field.name} is always {field.default}: vary it in {TABLE}"
            )
    acts = set().union(*(used[cls, "act"] for cls in ("Plain", "Gated", "Experts")))
    assert acts == set(get_args(ActivationName))


@every_decoder
def test_config_round_trips_through_json(config: DecoderConfig) -> None:
    assert fields.build(DecoderConfig, json.loads(json.dumps(fields.plain(config)))) == config


@every_decoder
def test_token_changes_later_logits_within_reach_only(config: DecoderConfig) -> None:
    model, tokens = decoder(config, torch.float64), token_ids(config, rows=1, length=10)
    windows = [at(config.attention, layer).window for layer in range(config.n_layers)]
    reach = sum(w - 1 for w in windows) if all(windows) else LENGTH
    for t in range(10):
        other = tokens.clone()
        other[0, t] = (tokens[0, t] + 1) % config.vocab_size
        changed = (model(tokens) - model(other)).abs().amax(-1)[0] > 1e-10  # larger than rounding errors
        assert not changed[:t].any()
        assert changed[t : t + reach + 1].all()
        assert not changed[t + reach + 1 :].any()


@pytest.mark.parametrize("way", WAYS)
@every_decoder
def test_every_way_to_run_gives_the_logits_of_the_plain_run(config: DecoderConfig, way: str) -> None:
    assert_equals_the_plain_run(config, way)


# a mutation: the mutated function, its replacement, and the decoder and way to run that must differ
MUTANTS: dict[str, tuple[str, Any, str, str]] = {
    "documents see each other": ("mask.Segments.of", lambda p: Segments(*[torch.zeros_like(p)] * 3), "llama", "packed"),
    "branches see each other": ("mask.Segments.visible", lambda *_: torch.tensor(True), "llama", "branched"),
    "branches see all of their document": (
        "mask.Segments.visible",
        lambda s, q, key_ids, _: (s.ids[q] == key_ids) | (s.documents[q] == key_ids),
        "llama",
        "branched",
    ),
    "a window forgets its last token": (
        "layer_cache.slot_positions",
        lambda slots, last: last - (last - torch.arange(slots)) % slots - 1,
        "gemma2",
        "one by one",
    ),
    "unreached slots are seen": (
        "mask.visible",
        lambda query, key, window: key <= query,
        "llama",
        "in chunks",
    ),
    "slots see the future": (
        "mask.visible",
        lambda query, key, window: (key >= 0) & (query >= 0),
        "llama",
        "rolled back",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_proof_of_the_plain_run_notices_mutant(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, broken, name, way = MUTANTS[mutant]
    monkeypatch.setattr(f"onward.model.{place}", broken)
    with pytest.raises(AssertionError):
        assert_equals_the_plain_run(DECODERS[name], way)


def test_proof_notices_window_slots_without_room_for_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = KVCache.__init__

    def tight(self: KVCache, *args: Any, **kwargs: Any) -> None:
        whole(self, *args, **kwargs)
        for layer, store in enumerate(self.layers):
            if window := at(DECODERS["gemma2"].attention, layer).window:
                self.layers[layer] = LayerCache({name: t[:, :window] for name, t in store.entries.items()}, window)

    monkeypatch.setattr(KVCache, "__init__", tight)
    for way in "in chunks", "rolled back", "ragged":
        with pytest.raises((AssertionError, RuntimeError)):
            assert_equals_the_plain_run(DECODERS["gemma2"], way)


def test_dropout_acts_in_training_only() -> None:
    config = parts.DecoderConfig(**{**DECODERS["gpt2"].__dict__, "dropout": 0.5})
    model, tokens = decoder(config), token_ids(config)
    assert torch.equal(model(tokens), decoder(DECODERS["gpt2"])(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


@every_decoder
def test_every_parameter_gets_a_gradient(config: DecoderConfig) -> None:
    model, tokens = decoder(config), token_ids(config, rows=4)
    torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    learned = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    still = [name for name, p in learned if p.grad is None or not p.grad.abs().sum() > 0]
    # softmax does not change when all scores are shifted
    assert still == [name for name in still if name.endswith("attn.k.bias")]
