"""What `import onward` gives."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import onward
from onward.language_model import LanguageModel


@pytest.fixture(scope="module")
def lm(tiny_run: Path) -> LanguageModel:
    return onward.load(tiny_run)


def test_importing_onward_does_not_import_torch_and_all_names_are_there() -> None:
    program = "import onward, sys; assert 'torch' not in sys.modules; print(*onward.__all__)"
    names = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert {"load", "save", "train", "Decoder", "DecoderConfig", "UserError"} <= set(names)
    assert all(getattr(onward, name) is not None for name in names)
    with pytest.raises(AttributeError, match="nonsense"):
        onward.nonsense  # noqa: B018


def test_a_string_gives_a_string_and_a_list_a_list(lm: LanguageModel) -> None:
    one = lm.generate("The cat", 12, temperature=0)
    assert isinstance(one, str)
    assert lm.generate(["The cat", "A dog"], 12, temperature=0) == [one, lm.generate("A dog", 12, temperature=0)]
    assert lm.generate([], 12) == []


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.5, "seed": 3}, {"top_p": 0.9, "seed": 1}])
def test_a_stream_joined_is_the_generated_text(lm: LanguageModel, sampling: dict) -> None:
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


def test_saving_and_loading_changes_nothing(lm: LanguageModel, tmp_path: Path) -> None:
    onward.save(lm, tmp_path)
    again = onward.load(tmp_path)
    assert again.config == lm.config
    for one, other in zip(again.model.parameters(), lm.model.parameters()):
        assert torch.equal(one, other)
    assert again.generate("The", 20, seed=1) == lm.generate("The", 20, seed=1)
    assert onward.load(tmp_path, dtype=torch.float64).model.embed.weight.dtype == torch.float64


def test_a_folder_without_a_tokenizer_loads_and_says_so_when_text_is_needed(lm: LanguageModel, tmp_path: Path) -> None:
    onward.save(LanguageModel(lm.model, None, lm.hf), tmp_path)
    bare = onward.load(tmp_path)
    assert bare.model(torch.tensor([[1, 2]])).shape == (1, 2, lm.config.vocab_size)
    calls = [lambda: bare.generate("x"), lambda: list(bare.stream("x")), lambda: bare.score("x")]
    for call in [*calls, lambda: bare.evaluate("x")]:
        with pytest.raises(onward.UserError, match=r"without a tokenizer\.json"):
            call()


def test_ids_without_text_are_never_sampled(lm: LanguageModel) -> None:
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


BAD = {
    "a prompt and new tokens beyond the context": (lambda lm: lm.generate("The cat", 1000), "context of 32"),
    "a text longer than the context": (lambda lm: lm.score("a b c d e f " * 9), "use evaluate, which slides"),
    "a temperature below 0": (lambda lm: lm.generate("The", temperature=-1), "temperature is -1"),
    "a device that is not there": (lambda lm: onward.load("x", device="tpu9"), "device 'tpu9' cannot be used"),
    "a folder that is not there": (lambda lm: onward.load("no/such"), r"there is no config\.json"),
    "a text of one token": (lambda lm: lm.evaluate(np.array([3])), "fewer than two tokens"),
    "an unknown option": (lambda lm: onward.train("x", "y", step=3), "did you mean steps"),
}


@pytest.mark.parametrize("case", BAD)
def test_one_sentence_for(case: str, lm: LanguageModel) -> None:
    call, message = BAD[case]
    with pytest.raises(onward.UserError, match=message) as caught:
        call(lm)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_of_another_model_is_one_sentence(lm: LanguageModel) -> None:
    small = LanguageModel(onward.Decoder(replace(lm.config, vocab_size=20)), lm.tokenizer)
    for call in lambda: small.generate("The cat"), lambda: small.score("The cat"), lambda: small.evaluate("The cat"):
        with pytest.raises(onward.UserError, match="another model"):
            call()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "hot"}, "temperature is 'hot'"),
    ({"top_k": 2.5}, "top_k is 2.5"),
    ({"n": 1.5}, "n is 1.5"),
    ({"seed": 1.5}, "seed is 1.5"),
    ({"stop": 5}, "stop is 5"),
    ({"json_schema": True}, "json_schema is True"),
    ({"temprature": 1}, "did you mean temperature"),
    ({"lookup": -1}, "at least 1"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=str)
def test_options_that_cannot_be_are_one_sentence(lm: LanguageModel, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lm.generate("The", 5, **options)


def test_one_processor_and_one_stop_text_need_no_list(lm: LanguageModel) -> None:
    ban = lambda text, logits: logits.index_fill(0, torch.tensor([lm.tokenizer.encode("e")[0]]), -torch.inf)
    plain = lm.generate("The", 20, temperature=0)
    assert "e" not in lm.generate("The", 20, temperature=0, processors=ban).replace("he", "")[:1]
    assert lm.generate("The", 20, temperature=0, stop=plain[3:5]) == plain[: plain.index(plain[3:5])]
