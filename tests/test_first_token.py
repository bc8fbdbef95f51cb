"""The cost of a call besides the forward pass does not grow with the model and does not include another read of the
weights."""

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from unittest.mock import patch

import pytest
import torch

import onward
from onward import BlockManager, Decoder, DecoderConfig, LanguageModel, PagedKVCache
from onward.api.language_model import GenerationKeywords
from onward.compiled import fingerprint
from onward.compiled.fingerprint import Snapshot
from onward.compiled.program import Program
from onward.config.lora import LoRA
from onward.generation.runner import COMPILE_AFTER
from onward.transforms.lora import add_lora
from onward.transforms.quantize import quantize_model

FORWARD = {Decoder.hidden_of_checked.__code__, Decoder.logits.__code__, Program.run.__code__}


def made(lm: LanguageModel, layers: int = 2, vocabulary: int = 0, context: int = 64) -> LanguageModel:
    size = vocabulary or lm.config.vocab_size
    config = DecoderConfig(vocab_size=size, d_model=16, n_layers=layers, n_heads=2, context_length=context)
    torch.manual_seed(0)
    return LanguageModel(Decoder(config).eval(), lm.tokenizer)


def num_calls(run: Callable[[], object], repeated: int) -> int:
    """The number of Python functions called outside the forward pass, after `repeated` runs."""
    count, inside = 0, 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal count, inside
        if event == "call" and (inside or frame.f_code in FORWARD):
            inside += 1
        elif event == "return" and inside:
            inside -= 1
        elif event == "call":
            count += 1

    for _ in range(repeated):
        run()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def calls_of(lm: LanguageModel, repeated: int) -> Iterator[int]:
    lm.tokenizer.templates["default"] = "{{ messages[0].content }}"  # type: ignore[union-attr]
    yield num_calls(lambda: lm.generate("The cat", 1, temperature=0), repeated)
    yield num_calls(lambda: lm.complete(["The cat sat on the mat.", "A dog"], 1, seed=1), repeated)
    yield num_calls(lambda: list(lm.stream("The cat", 1, temperature=0)), repeated)
    yield num_calls(lambda: lm.chat("The cat", 1, temperature=0), repeated)


@pytest.mark.parametrize("larger", [{"layers": 6}, {"vocabulary": 5000}, {"context": 4096}], ids=str)
@pytest.mark.parametrize("repeated", [2, COMPILE_AFTER + 2], ids=["plain", "compiled"])
@pytest.mark.parametrize("precision", [None, "int8"])
def test_a_call_does_as_much_beside_the_forward_pass_of_any_model(
    lm: LanguageModel, larger: dict[str, int], repeated: int, precision: str | None
) -> None:
    found = []
    for sizes in {}, larger:
        one = made(lm, **sizes)
        if precision:
            quantize_model(one.model, precision)
        found.append([*calls_of(one, repeated)])
    # a larger vocabulary may split the text into different tokens
    assert found[0] == pytest.approx(found[1], abs=8)


def test_calls_neither_describe_the_model_again_nor_read_its_weights(lm: LanguageModel) -> None:
    lm = made(lm, context=256)
    asked = ["The cat sat on the mat, and " * 3 + end for end in ("the dog sat beside it.", "then it ran.")]
    with (
        patch.object(Snapshot, "__init__", autospec=True, side_effect=Snapshot.__init__) as described,
        patch.object(fingerprint, "checksum", side_effect=fingerprint.checksum) as read,
    ):
        first = lm.complete(asked, 20, temperature=0)
        found = described.call_count, read.call_count
        assert min(found) > 0
        again = [lm.complete(asked, 20, temperature=0) for _ in range(2)]
        assert (described.call_count, read.call_count) == found
    assert [[a.tokens for a in one] for one in first] == [[a.tokens for a in one] for one in again[1]]


@pytest.mark.parametrize("kind", ["cache", "prompt_cache"])
def test_own_caches_read_the_weights_again_only_after_a_change_that_versions_tell(
    lm: LanguageModel, kind: str, tmp_path: Path
) -> None:
    lm = made(lm)
    cache = BlockManager(PagedKVCache(lm.config, 1, 64, 16, block_size=2, blocks=70))
    own: GenerationKeywords = {"cache": cache, "rows": 1} if kind == "cache" else {"prompt_cache": tmp_path}
    ask = lambda **given: lm.generate("The cat sat on the mat.", 4, temperature=0, **given)
    with patch.object(fingerprint, "checksum", side_effect=fingerprint.checksum) as read:
        assert ask(**own) == ask()
        times = read.call_count
        assert times > 0
        assert ask(**own) == ask()
        assert read.call_count == times
        with torch.no_grad():
            lm.model.blocks[0].mlp.down.weight.mul_(-9)
        assert ask(**own) == ask()
        assert read.call_count > times
    lm.model.blocks[0].mlp.down.weight.data = -lm.model.blocks[0].mlp.down.weight.data
    assert ask(**own) == ask()


def test_a_prompt_read_by_weights_changed_without_a_version_is_not_saved(lm: LanguageModel, tmp_path: Path) -> None:
    lm = made(lm)
    ask = lambda prompt: lm.generate(prompt, 1, temperature=0, prompt_cache=tmp_path)
    ask("The cat")
    files = [*tmp_path.iterdir()]
    lm.model.blocks[0].mlp.down.weight.data.mul_(-9)
    with pytest.warns(UserWarning, match="the prompt is not saved: the weights have changed"):
        ask("A dog")
    assert [*tmp_path.iterdir()] == files
    lm.state = None  # as in another process
    ask("A dog")
    assert len([*tmp_path.iterdir()]) == len(files) + 1


def test_an_engine_is_lent_again_only_to_the_model_and_tokenizer_it_was_made_for(lm: LanguageModel) -> None:
    lm = made(lm)
    ask = lambda of: of.generate("The cat", 4, temperature=0)
    before = ask(lm)
    [engine] = lm.idle.values()
    assert ask(lm) == before
    assert [*lm.idle.values()] == [engine]
    assert ask(copy.deepcopy(lm)) == before

    stream = lm.stream("The cat", 4, temperature=0)
    next(stream)
    assert ask(lm) == before, "while another answer grows"
    [other] = lm.idle.values()
    assert other is not engine
    stream.close()
    assert [*lm.idle.values()] == [other], "an engine that was left amid an answer is not lent"

    with torch.no_grad():
        lm.model.blocks[0].mlp.down.weight.mul_(-9)
    assert ask(lm) == ask(onward.LanguageModel(copy.deepcopy(lm.model), lm.tokenizer))
    lm.model.to(torch.bfloat16)
    assert ask(lm) == ask(onward.LanguageModel(copy.deepcopy(lm.model), lm.tokenizer))
    assert other not in lm.idle.values()
    lm.generate("The cat", 2, lookup=2)
    assert not lm.idle


def test_an_engine_of_integer_weights_is_lent_again_and_one_with_adapters_is_not(lm: LanguageModel) -> None:
    lm = made(lm)
    ask = lambda: lm.generate("The cat", 4, temperature=0)
    ask()
    quantize_model(lm.model, "int8")
    expected = onward.LanguageModel(copy.deepcopy(lm.model), lm.tokenizer).generate("The cat", 4, temperature=0)
    assert ask() == expected
    [engine] = lm.idle.values()
    assert ask() == expected
    assert [*lm.idle.values()] == [engine]
    add_lora(lm.model, LoRA())
    assert ask() == expected
    assert not lm.idle
