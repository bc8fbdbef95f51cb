"""Models with their tokenizers: generation, scoring, evaluation and saving."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import onward
from onward import LanguageModel
from onward.base import arguments


def test_evaluate_reads_paths_as_train_does(lm: LanguageModel, story_file: Path) -> None:
    text = story_file.read_text(encoding="utf-8")
    assert lm.evaluate(story_file) == lm.evaluate(text)
    assert lm.evaluate([story_file, "A cat."]) == lm.evaluate([text, "A cat."])
    assert lm.evaluate("a text with a zero byte \0").tokens


def test_generate_returns_a_text_for_a_text_and_a_list_for_a_list(lm: LanguageModel) -> None:
    one = lm.generate("The cat", 12, temperature=0)
    assert isinstance(one, str)
    assert lm.generate(["The cat", "A dog"], 12, temperature=0) == [one, lm.generate("A dog", 12, temperature=0)]
    assert lm.generate([], 12) == []


CALLS: dict[str, Callable[[LanguageModel], object]] = {
    "generate": lambda lm: lm.generate("The cat", 3),
    "stream": lambda lm: [*lm.stream("The cat", 3)],
    "beam_search": lambda lm: lm.beam_search("The cat", 3, beams=2),
    "score": lambda lm: lm.score("The cat sat."),
    "evaluate": lambda lm: lm.evaluate("The cat sat."),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_calls_run_without_dropout_and_restore_the_mode_of_each_module(
    lm: LanguageModel, call: Callable[[LanguageModel], object]
) -> None:
    model = copy.deepcopy(lm.model).train()
    model.blocks[0].eval()
    before, modes = [module.training for module in model.modules()], []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    call(LanguageModel(model, lm.tokenizer))
    assert modes
    assert not any(modes)
    assert [module.training for module in model.modules()] == before


def streamed(lm: LanguageModel) -> Iterator[object]:
    return lm.stream("The cat", 9)


def run(lm: LanguageModel) -> Iterator[object]:
    engine = lm.engine()
    engine.add(onward.Request([1, 2, 3], max_new_tokens=9, sampling=onward.Sampling(temperature=0)))
    return engine.run()


@pytest.mark.parametrize("begin", [streamed, run])
def test_a_stream_that_waits_leaves_the_mode_of_the_model_to_the_caller(
    lm: LanguageModel, begin: Callable[[LanguageModel], Any]
) -> None:
    model = copy.deepcopy(lm.model).train()
    stream = begin(LanguageModel(model, lm.tokenizer))
    next(stream)
    assert model.training
    model.eval()
    stream.close()
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.5, "seed": 3}, {"top_p": 0.9, "seed": 1}])
def test_joined_pieces_of_a_stream_are_the_generated_text(lm: LanguageModel, sampling: dict) -> None:
    text = lm.generate("The old king", 60, slide=True, **sampling)
    pieces = list(lm.stream("The old king", 60, slide=True, **sampling))
    assert "".join(pieces) == text
    assert all(pieces)
    assert "\ufffd" not in "".join(pieces[:-1]) or "\ufffd" in text


def test_the_same_seed_gives_the_same_text_and_each_prompt_its_own_draws(lm: LanguageModel) -> None:
    first = lm.generate(["The", "The"], 20, temperature=1.5, seed=4)
    assert first == lm.generate(["The", "The"], 20, temperature=1.5, seed=4)
    assert first[0] != first[1]
    assert first[1] == lm.generate("The", 20, temperature=1.5, seed=5)


def test_a_call_is_checked_at_its_door_alone_and_asks_for_the_vocabulary_once(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm.generate("The", 4)
    checked, types = list[str](), arguments.types

    def noted(function: Any) -> Any:
        checked.append(function.__qualname__)
        return types(function)

    monkeypatch.setattr(arguments, "types", noted)
    lm.generate(["The", "A dog"], 4)
    lm.complete("The", 4, n=2)
    assert [*lm.stream("The", 4)]
    assert checked == ["LanguageModel.generate", "LanguageModel.complete", "LanguageModel.stream"]
    changed = lm.allowed()
    changed[:] = False
    assert lm.generate("The", 4)


def test_an_empty_prompt_starts_from_the_beginning_token(lm: LanguageModel) -> None:
    assert lm.generate("", 10, temperature=0)


def test_scores_are_the_log_probabilities_and_their_exact_sum(lm: LanguageModel) -> None:
    text = "The cat sang on the café.\n"
    score = lm.score(text)
    context = [lm.tokenizer.bos_id, *lm.tokenizer.encode(text)]
    with torch.no_grad():
        rows = lm.model(torch.tensor([context]))[0].double().tolist()
    expected = [row[i] - math.log(sum(map(math.exp, row))) for row, i in zip(rows, context[1:])]
    assert score.tokens == context[1:]
    assert score.logprobs == pytest.approx(expected, abs=1e-5)
    assert score.total == math.fsum(score.logprobs)
    assert len(score.pieces) == len(score.tokens)


def test_the_probabilities_of_all_next_tokens_sum_to_one(lm: LanguageModel) -> None:
    assert lm.score("").total == 0.0
    with torch.no_grad():
        logits = lm.model(torch.tensor([[lm.tokenizer.bos_id]]))[0, -1]
    one = lm.score("T").logprobs[0]
    assert math.exp(one) == pytest.approx(float(logits.softmax(-1)[lm.tokenizer.encode("T")[0]]), rel=1e-5)


def test_bits_per_byte_count_the_bytes_of_the_text(lm: LanguageModel, story: str) -> None:
    text = story[:900]
    found = lm.evaluate(text)
    assert found.bytes == len(text.encode())
    assert found.tokens == len(lm.tokenizer.encode(text))
    assert found.bits_per_byte == pytest.approx(found.loss * found.tokens / math.log(2) / found.bytes)
    assert found.bits_per_byte < 3


def test_bits_per_byte_count_the_bytes_of_characters_that_the_tokenizer_does_not_know(lm: LanguageModel) -> None:
    tokenizer = onward.train_tokenizer("char", ["The cat sat."])
    model = onward.Decoder(replace(lm.config, vocab_size=tokenizer.vocab_size)).eval()
    text = "Zig-zag: the quick brown fox jumped over it!?\n"
    found = LanguageModel(model, tokenizer).evaluate([text, text])
    assert tokenizer.byte_count(tokenizer.encode(text)) > len(text) == len(text.encode())
    assert found.bytes == 2 * len(text)
    assert found.bits_per_byte == pytest.approx(found.loss * found.tokens / math.log(2) / (2 * len(text)))


def test_saving_and_loading_changes_nothing(lm: LanguageModel, tmp_path: Path) -> None:
    onward.save(lm, tmp_path)
    again = onward.load(tmp_path)
    assert again.config == lm.config
    for one, other in zip(again.model.parameters(), lm.model.parameters()):
        assert torch.equal(one, other)
    assert again.generate("The", 20, seed=1) == lm.generate("The", 20, seed=1)
    assert onward.load(tmp_path, dtype=torch.float64).model.embed.weight.dtype == torch.float64


@pytest.mark.parametrize(("precision", "bound"), [("int8", 0.01), ("int4", 0.2)])
def test_a_quantized_model_scores_nearly_as_the_plain_one_and_is_saved(
    precision: Any, bound: float, tiny_run: Path, lm: LanguageModel, tmp_path: Path
) -> None:
    quantized = onward.load(tiny_run, quantize=precision)
    losses = [m.evaluate("the cat sat on the mat and the dog sat on the log").loss for m in (lm, quantized)]
    assert abs(losses[0] - losses[1]) < bound
    onward.save(quantized, tmp_path / "out")
    assert onward.load(tmp_path / "out").generate("the", 5, seed=1) == quantized.generate("the", 5, seed=1)


def test_ids_without_a_token_are_never_sampled(lm: LanguageModel) -> None:
    size = lm.tokenizer.vocab_size
    padded = LanguageModel(onward.Decoder(replace(lm.config, vocab_size=size + 200)).eval(), lm.tokenizer)
    of = [padded.complete(["a"] * 8, 30, temperature=5.0, seed=0)]
    tokens = [token for answers in of for (answer,) in answers for token in answer.tokens]
    assert len(tokens) > 100
    assert max(tokens) < size


def test_stories_260k_tells_the_story_transformers_tells(shared: Path) -> None:
    transformers = pytest.importorskip("transformers")
    stories = onward.load(shared / "stories260K")
    text = stories.generate("Once upon a time", 60, temperature=0)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(shared / "stories260K").eval()
    ids = torch.tensor([stories.tokenizer.encode("Once upon a time")])
    out = theirs.generate(ids, max_new_tokens=60, do_sample=False)[0, ids.size(1) :].tolist()
    assert text == stories.tokenizer.decode(out)
    assert "there was a little girl" in text
    assert stories.evaluate(f"Once upon a time{text}").loss < 1.5


def test_scalars_of_numpy_and_torch_are_numbers(lm: LanguageModel) -> None:
    plain = lm.generate("The", 5, temperature=0.5, seed=4)
    assert lm.generate("The", np.int64(5), temperature=torch.tensor(0.5), seed=np.uint8(4)) == plain  # type: ignore[call-overload]


def test_options_are_one_value_or_keywords_that_replace_its_fields(lm: LanguageModel) -> None:
    options = onward.GenerationOptions(temperature=1.5, seed=3, max_new_tokens=9, n=2)
    assert lm.complete("The", options=options) == lm.complete("The", 9, n=2, temperature=1.5, seed=3)
    assert lm.generate("The", options=options) == lm.generate("The", 9, n=2, temperature=1.5, seed=3)
    assert lm.generate("The", 5, options=options, n=1, seed=8) == lm.generate("The", 5, temperature=1.5, seed=8)
    one = replace(options, n=1)
    assert "".join(lm.stream("The", options=one)) == lm.generate("The", options=one)
    assert lm.beam_search("The", options=one) == lm.beam_search("The", 9, temperature=1.5)


def test_one_processor_and_one_stop_text_need_no_list(lm: LanguageModel) -> None:
    ban = lambda text, logits: logits.index_fill(0, torch.tensor([lm.tokenizer.encode("e")[0]]), -torch.inf)
    plain = lm.generate("The", 20, temperature=0)
    assert "e" not in lm.generate("The", 20, temperature=0, processors=ban).replace("he", "")[:1]
    assert lm.generate("The", 20, temperature=0, stop=plain[3:5]) == plain[: plain.index(plain[3:5])]


def test_a_stop_text_that_the_last_token_completes_is_the_reason_of_the_end(lm: LanguageModel) -> None:
    forced = [lm.text().inner.token_to_id(symbol) for symbol in ("a", "Ã")]  # a letter, and the first half of é
    found = [lm.complete("The", 2, forced_tokens=forced, stop=stop)[0][0] for stop in ("\ufffd", ".")]
    assert [(answer.text, answer.finish_reason) for answer in found] == [("a", "stop"), ("a\ufffd", "length")]
