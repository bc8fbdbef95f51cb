"""Each variant of a study trains on the tokens of its own texts and tokenizer, in whatever order variants are added."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from onward import RunConfig, Tokenizer, UserError
from onward.training.studies.scaling_study import open_study
from onward.training.studies.tokens import OPTIONS
from onward.training.studies.variants import Variant, common_measure, prepare_variants

SMALL = {"d_model": 16, "n_layers": 1, "n_heads": 2, "context_length": 16}
CHANGED = "the content of {} or its time changed since {} was begun"


@pytest.fixture
def config(story_file: Path, tmp_path: Path) -> RunConfig:
    """A run on a text that a test may edit, in the folder `study`."""
    (text := tmp_path / "text.txt").write_text(story_file.read_text())
    return RunConfig(sources=(str(text),), out=str(tmp_path / "study"), model=SMALL, tokenizer="char", steps=1)


def prepared(config: RunConfig, *tokenizers: str) -> dict[str, tuple[str, int]]:
    """The folder of the tokens and the vocabulary size of a variant for each tokenizer, by name."""
    ready = prepare_variants([Variant(name.replace(":", "-"), replace(config, tokenizer=name)) for name in tokenizers])
    folders = {name: one.config.sources[0] for name, one in zip(tokenizers, ready)}
    return {name: (folder, Tokenizer.load(folder).vocab_size) for name, folder in folders.items()}


def test_added_and_reordered_variants_train_on_the_tokens_of_their_own_tokenizer(config: RunConfig) -> None:
    first = prepared(config, "byte", "char")
    second = prepared(config, "bpe:280", "char", "byte")
    assert second == first | {"bpe:280": second["bpe:280"]}, "earlier tokens are used again"
    assert len({size for _, size in second.values()}) == 3, "a tokenizer each"


def test_variants_on_another_text_are_refused(config: RunConfig, tmp_path: Path) -> None:
    prepared(config, "char")
    (other := tmp_path / "other.txt").write_text("Another text of a few words. " * 40)
    message = f"{config.out} contains char with sources ['{config.sources[0]}'], not ['{other}']: choose another --out"
    for tokenizer in "char", "byte":  # the same variant, and another one
        with pytest.raises(UserError, match=re.escape(message)):
            prepared(replace(config, sources=(str(other),)), tokenizer)


def test_variants_on_another_text_are_added_if_all_have_the_same_validation_text(
    config: RunConfig, tmp_path: Path
) -> None:
    (held_out := tmp_path / "held-out.txt").write_text("A text that is held out for validation. " * 40)
    (other := tmp_path / "other.txt").write_text("Another text of a few words. " * 40)
    config = replace(config, validation=str(held_out))
    assert prepared(config, "char") != prepared(replace(config, sources=(str(other),)), "byte")
    held_out.write_text("Edited. " * 100)
    with pytest.raises(UserError, match=re.escape(CHANGED.format(held_out, config.out))):
        prepared(config, "char")


def test_edited_text_is_refused(config: RunConfig) -> None:
    text = Path(config.sources[0])
    prepared(config, "char")
    text.write_text(text.read_text() + "One more sentence.")
    with pytest.raises(UserError, match=re.escape(CHANGED.format(text, config.out))):
        prepared(config, "char")
    with pytest.raises(UserError, match=re.escape(CHANGED.format(text, config.out))):
        open_study(config, grid_flops="1e9")


def test_folders_of_an_earlier_version_are_used_if_their_tokenizer_is_known(config: RunConfig) -> None:
    """Earlier versions did not record the options of the tokens."""
    first = prepared(config, "char")
    (Path(config.out) / "data-1" / OPTIONS).unlink()
    second = prepared(config, "byte", "char")
    assert second["char"] == first["char"]
    assert prepared(config, "byte", "char") == second
    (Path(config.out) / "data-1" / OPTIONS).unlink()
    with pytest.raises(UserError, match=r"Cannot tell the tokenizer of the tokens in .*data-1, which an earlier"):
        prepared(config, "char")


def test_variants_with_other_bases_may_have_other_tokenizers(config: RunConfig) -> None:
    config = replace(config, tokenizer="")
    bases = [Variant(name, replace(config, base=name)) for name in "ab"]
    assert common_measure(bases) == "bits_per_byte"
    assert common_measure(bases[:1] * 2) == "loss"
