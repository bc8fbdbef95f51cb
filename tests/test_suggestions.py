"""For an unknown name, the message suggests the known name that was probably meant."""

import pytest

from onward import DecoderConfig, FeedForward, GenerationOptions, Position, RunConfig
from onward.base.fields import hints
from onward.base.suggestions import OTHERWISE, SYNONYMS, nearest, parts
from onward.cli.commands.train import Options
from onward.cli.shared.arguments import arguments

TRAIN = [argument.flag for argument in arguments(Options)]
GENERATE = ["--temperature", "--top-k", "--top-p", "--max-new-tokens", "--time", "--stop", "--n", "--no-json"]
MEANT = [
    ("rope", Position.choices(), "rotary"),
    ("nope", Position.choices(), "none"),
    ("swiglu", FeedForward.choices(), "gated"),
    ("moe", FeedForward.choices(), "experts"),
    ("--lr", TRAIN, "--learning-rate"),
    ("--batch", TRAIN, "--batch-size"),
    ("--stepz", TRAIN, "--steps"),
    ("--model.window", TRAIN, "--model.attention.window"),
    ("--window", TRAIN, "--model.attention.window"),
    ("--model.positon.theta", TRAIN, "--model.position.theta"),
    ("--d-model", TRAIN, "--model.d-model"),
    ("--model.hidden-size", TRAIN, "--model.d-model"),
    ("--temp", GENERATE, "--temperature"),
    ("--greedy", GENERATE, "--temperature"),
    ("--do-sample", GENERATE, "--temperature"),
    ("--max-tokens", GENERATE, "--max-new-tokens"),
    ("max_tokens", ["max_new_tokens", "min_new_tokens"], "max_new_tokens"),
    ("llama", ["llama-7b", "gpt2"], "llama-7b"),
    ("experts", ["count", "top_k", "d_ff"], "count"),
    ("per_token", ["count", "top_k", "d_ff"], "top_k"),
    ("llama3", ["llama-30b", "llama-3-8b", "llama-3-70b"], "llama-3-8b"),
    ("gemma2", ["gemma-7b", "gemma-2-2b", "gemma-2-27b"], "gemma-2-2b"),
    ("gpt2-small", ["gpt2", "gpt2-medium", "gpt2-xl"], "gpt2"),
    ("llama3.1-8b", ["llama-3.1-8b", "llama-3-8b", "phi-1.8b"], "llama-3.1-8b"),
]


@pytest.mark.parametrize(("name", "known", "meant"), MEANT, ids=str)
def test_nearest_name_is_the_one_that_was_meant(name: str, known: list[str], meant: str) -> None:
    assert nearest(name, known) == f"did you mean {meant}?"


def test_a_name_near_nothing_is_answered_with_all_of_a_few() -> None:
    assert nearest("zzz", ["b", "a"]) == "choose from a, b"


def test_synonyms_lead_to_names_that_exist() -> None:
    classes = [DecoderConfig, RunConfig, GenerationOptions]
    kinds = {kind for argument in arguments(Options) for kind in argument.choices}
    options = {parts(flag)[-1] for flag in TRAIN} | {name for cls in classes for name in hints(cls)}
    elsewhere = {
        "beams",
        "draft",
        "quantize",
        *("q", "k", "v", "gate", "up", "down"),
        *("number", "json_schema"),
    }  # options of `onward generate`; weights of a block; rewards
    assert {*SYNONYMS.values()} <= options | kinds | elsewhere
    # options of chat, finetune, bench, convert
    of_commands = {"context", "length", "completion_length", "new", "dtype", "to"}
    assert {name for names in OTHERWISE.values() for name in names} <= options | of_commands
