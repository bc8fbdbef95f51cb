"""What `import onward` gives."""

import inspect
import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints, is_typeddict

import numpy as np
import pytest
import torch

import onward
from onward.config.part_types import DecoderPart
from onward.errors import UserError
from onward.families import families
from onward.fields import Part, hints
from onward.generation.keywords import BeamKeywords, ContrastiveKeywords
from onward.generation.options import OptionKeywords
from onward.generation.sampling import SamplingKeywords
from onward.generation.search.beam import beam_search
from onward.generation.search.contrastive import contrastive_search
from onward.language_model import EngineKeywords, LanguageModel
from onward.text.tokenizer import train_tokenizer

SEARCH_ARGUMENTS = {  # of the functions, which the facade passes
    *["model", "prompts", "max_new_tokens", "min_new_tokens", "sampling", "stop_token_ids", "allowed", "n"]
}


@pytest.fixture(scope="module")
def lm(tiny_run: Path) -> LanguageModel:
    return onward.load(tiny_run)


NAMED = {
    "evaluate": (lambda lm, name: lm.evaluate(name), r"give Path\('story.txt'\)"),
    "evaluate several": (lambda lm, name: lm.evaluate(["A cat.", name]), r"give Path\('story.txt'\)"),
    "score": (lambda lm, name: lm.score(name), r"give Path\('story.txt'\).read_text\(\)"),
    "classify": (lambda lm, name: lm.classify([("A cat", name)]), r"read_text\(\)"),
    "train_tokenizer": (lambda lm, name: train_tokenizer("char", [name]), r"read_text\(\)"),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_text_that_names_a_file_is_refused(
    name: str, lm: LanguageModel, story_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, advice = NAMED[name]
    monkeypatch.chdir(story_file.parent)
    with pytest.raises(UserError, match=f"'story.txt', the name of a file and not the text in it: .*{advice}"):
        call(lm, "story.txt")


def test_evaluate_reads_paths_as_train_does(lm: LanguageModel, story_file: Path) -> None:
    text = story_file.read_text(encoding="utf-8")
    assert lm.evaluate(story_file) == lm.evaluate(text)
    assert lm.evaluate([story_file, "A cat."]) == lm.evaluate([text, "A cat."])
    assert lm.evaluate("a text with a zero byte \0").tokens


def test_loading_a_model_imports_no_training_and_no_reports() -> None:
    unused = {"onward.training", "onward.reports", "torch.distributed.fsdp", "sympy"}
    program = f"import onward, sys; onward.load; print(*({unused} & {{*sys.modules}}))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "\n"


def test_importing_onward_does_not_import_torch_and_all_names_are_there() -> None:
    program = "import onward, sys; assert 'torch' not in sys.modules; from onward import *; print(*sorted(globals()))"
    names = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert {name for name in names if not name.startswith("__")} == {*onward.__all__, "onward", "sys"}
    assert all(getattr(onward, name).__name__ == name for name in onward.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        onward.nonsense  # noqa: B018


def test_every_part_that_users_can_choose_is_a_public_name() -> None:
    families()  # which define parts that are not
    types = [*Part.__subclasses__(), *DecoderPart.__subclasses__()]
    types.remove(DecoderPart)
    kinds = (kind for base in types for kind in (base, *base.choices().values()))
    decoders = tuple(f"onward.{folder}." for folder in ("config", "families"))  # not training, and no page's example
    names = {kind.__name__ for kind in kinds if kind.__module__.startswith(decoders)}
    assert "Rotary" in names
    assert names <= set(onward.__all__)


def test_every_class_that_the_facade_takes_or_returns_is_a_public_name() -> None:
    methods = [f for name, f in vars(LanguageModel).items() if inspect.isfunction(f) and not name.startswith("_")]
    kinds = [kind for f in [*methods, onward.load, onward.train] for kind in get_type_hints(f).values()]
    named: set[str] = set()
    while kinds:
        kind = kinds.pop()
        kinds += get_args(kind)
        if isinstance(kind, type) and kind.__module__.startswith("onward.") and not is_typeddict(kind):
            named.add(kind.__name__)
    assert "Completion" in named
    assert named <= set(onward.__all__)


ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.py")]


def test_every_name_of_onward_on_a_page_is_a_public_name_or_in_its_module() -> None:
    named = {found for page in PAGES for found in re.findall(r"\bonward\.(\w+(?:\.\w+)*)", page.read_text())}
    modules = {path.stem for path in (ROOT / "src/onward").iterdir()}
    assert "load" in named
    assert {first for first in (name.split(".")[0] for name in named) if first not in modules} <= {
        *onward.__all__,
        *["ai", "py"],  # of an address, of a file
    }


KEYWORDS: dict[str, tuple[Any, set[str]]] = {
    "Sampling": (SamplingKeywords, {*hints(onward.Sampling)}),
    "GenerationOptions": (OptionKeywords, {*hints(onward.GenerationOptions)} - {"max_new_tokens", "n"}),
    "engine": (EngineKeywords, {*inspect.signature(LanguageModel.engine).parameters} - {"self"}),
    "beam search": (BeamKeywords, {*inspect.signature(beam_search).parameters} - SEARCH_ARGUMENTS),
    "contrastive search": (
        ContrastiveKeywords,
        {*inspect.signature(contrastive_search).parameters} - SEARCH_ARGUMENTS,
    ),
}


@pytest.mark.parametrize("kind", KEYWORDS)
def test_typed_keywords_are_the_options_that_there_are(kind: str) -> None:
    typed, names = KEYWORDS[kind]
    assert typed.__optional_keys__ == names
    assert not typed.__required_keys__


def test_generate_returns_a_text_for_a_text_and_a_list_for_a_list(lm: LanguageModel) -> None:
    one = lm.generate("The cat", 12, temperature=0)
    assert isinstance(one, str)
    assert lm.generate(["The cat", "A dog"], 12, temperature=0) == [one, lm.generate("A dog", 12, temperature=0)]
    assert lm.generate([], 12) == []


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


def test_a_model_without_a_tokenizer_refuses_text_in_one_sentence(lm: LanguageModel, tmp_path: Path) -> None:
    onward.save(LanguageModel(lm.model, None, lm.hf), tmp_path)
    bare = onward.load(tmp_path)
    assert bare.model(torch.tensor([[1, 2]])).shape == (1, 2, lm.config.vocab_size)
    calls = [lambda: bare.generate("x"), lambda: list(bare.stream("x")), lambda: bare.score("x")]
    for call in [*calls, lambda: bare.evaluate("x")]:
        with pytest.raises(onward.UserError, match=r"without a tokenizer\.json"):
            call()


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


BAD = {
    "a prompt and new tokens beyond the context": (lambda lm: lm.generate("The cat", 1000), "context of 32"),
    "a text longer than the context": (lambda lm: lm.score("a b c d e f " * 9), "use evaluate, which slides"),
    "a temperature below 0": (lambda lm: lm.generate("The", temperature=-1), "temperature is -1"),
    "a device that is not there": (lambda lm: onward.load("x", device="tpu9"), "device is 'tpu9'"),
    "a folder that is not there": (lambda lm: onward.load("no/such"), r"there is no folder no/such"),
    "a text of one token": (lambda lm: lm.evaluate(np.array([3])), "fewer than two tokens"),
    "an unknown option": (lambda lm: onward.train("x", "y", step=3), "did you mean steps"),  # type: ignore[call-arg]
}


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_one_sentence(case: str, lm: LanguageModel) -> None:
    call, message = BAD[case]
    with pytest.raises(onward.UserError, match=message) as caught:
        call(lm)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_of_another_model_is_one_sentence(lm: LanguageModel) -> None:
    small = LanguageModel(onward.Decoder(replace(lm.config, vocab_size=20)), lm.tokenizer)
    for call in lambda: small.generate("The cat"), lambda: small.score("The cat"), lambda: small.evaluate("The cat"):
        with pytest.raises(onward.UserError, match="another model"):
            call()


WRONG: dict[str, tuple[Callable[[Any], object], str]] = {
    "temperature as text": (
        lambda lm: lm.generate("The", 5, temperature="hot"),
        "temperature is 'hot': it must be a number from 0",
    ),
    "a number as text": (
        lambda lm: lm.generate("The", max_new_tokens="5"),
        "max_new_tokens is '5': it takes int",
    ),
    "a value in the dataclass": (lambda lm: onward.Sampling(top_p="0.5"), "top_p is '0.5': it must be a number"),  # type: ignore[arg-type]
    "fewer than no tokens": (
        lambda lm: lm.generate("The", -1),
        "max_new_tokens is -1: it must be",
    ),
    "half a top_k": (lambda lm: lm.generate("The", 5, top_k=2.5), "top_k is 2.5: it must be a whole number"),
    "half an answer": (lambda lm: lm.generate("The", 5, n=1.5), "n is 1.5: it takes int"),
    "no answer": (lambda lm: lm.generate("The", 5, n=0), "n is 0: it must be a whole number from 1"),
    "half a seed": (lambda lm: lm.generate("The", 5, seed=1.5), "seed is 1.5: it takes int"),
    "a stop that is no text": (lambda lm: lm.generate("The", 5, stop=5), "stop is 5"),
    "an empty stop text": (lambda lm: lm.generate("The", 5, stop=""), "a stop text is empty"),
    "a function as stop": (lambda lm: lm.generate("The", 5, stop=len), "give it as stop_when"),
    "a text as stop_when": (lambda lm: lm.generate("The", 5, stop_when="."), "stop_when is '.': it takes Callable"),
    "a stop token as text": (
        lambda lm: lm.generate("The", 5, stop_token_ids=["a"]),
        r"stop_token_ids is \['a'\]: it must",
    ),
    "a schema of truth": (lambda lm: lm.generate("The", 5, json_schema=True), "json_schema is True"),
    "two forms": (lambda lm: lm.generate("The", 5, regex="a", json_schema="{}"), "choose one"),
    "negative logprobs": (lambda lm: lm.complete("The", 5, logprobs=-1), "logprobs is -1"),
    "an unknown name": (lambda lm: lm.generate("The", 5, temprature=1), "did you mean temperature"),
    "another library's name": (lambda lm: lm.generate("The", max_tokens=5), "did you mean max_new_tokens"),
    "another library's beams": (lambda lm: lm.beam_search("The", 5, num_beams=4), "did you mean beams"),
    "a draft in a search": (lambda lm: lm.beam_search("The", 5, draft=lm), "draft is not an option of this method"),
    "a stop text in a search": (lambda lm: lm.beam_search("The", 5, stop="."), "stop is given, but a search"),
    "beams as text": (lambda lm: lm.beam_search("The", 5, beams="4"), "beams is '4': it takes int"),
    "options that are none": (lambda lm: lm.generate("The", options={"n": 2}), "it takes GenerationOptions"),
    "several streams": (lambda lm: [*lm.stream("The", options=onward.GenerationOptions(n=2))], "n is 2: a stream"),
    "a negative lookup": (lambda lm: lm.generate("The", 5, lookup=-1), "lookup is -1"),
    "a draft that is no model": (lambda lm: lm.generate("The", draft="small"), "it takes LanguageModel | None"),
    "a number as prompt": (lambda lm: lm.generate(5), r"prompt is 5: it takes str \| Sequence"),
    "no prompt": (lambda lm: lm.generate(None), "prompt is None"),
    "bytes as prompt": (lambda lm: lm.generate(b"The"), "prompt is b'The'"),
    "bytes among prompts": (lambda lm: lm.complete(["The", b"A"]), r"prompt is \['The', b'A'\]: it takes"),
    "a number as stream": (lambda lm: [*lm.stream(5)], r"prompt is 5: it takes str \| Sequence\[int\]"),
    "a number as messages": (lambda lm: lm.chat(5), r"messages is 5: it takes str \| Sequence"),
    "a number to score": (lambda lm: lm.score(3), "text is 3: it takes str"),
    "a number to evaluate": (lambda lm: lm.evaluate(3), "text is 3: it takes str"),
    "a number among documents": (lambda lm: lm.evaluate(["a", 3]), r"text is \['a', 3\]: it takes str"),
    "fractions as tokens": (lambda lm: lm.evaluate(np.zeros(9)), "tokens are float64"),
    "half a stride": (lambda lm: lm.evaluate("The cat", 1.5), "stride is 1.5"),
    "no folder": (lambda lm: onward.load(None), "model is None: it takes str"),  # type: ignore[arg-type]
    "a dtype as text": (lambda lm: onward.load("x", "bf16"), "dtype is 'bf16'"),  # type: ignore[arg-type]
    "nothing to save": (lambda lm: onward.save(None, "x"), "lm is None: it takes LanguageModel"),  # type: ignore[arg-type]
    "tokens without a batch": (lambda lm: lm.model(torch.tensor([1, 2, 3])), r"tokens are int64 \(3,\): give ids"),
    "a list of tokens": (lambda lm: lm.model([[1, 2]]), "tokens are list: give a tensor of ids"),
    "vectors without a width": (lambda lm: lm.model(torch.zeros(1, 2)), r"tokens are float32 \(1, 2\)"),
    "no tokens": (lambda lm: lm.model(torch.zeros(1, 0, dtype=torch.long)), "at least one token"),
    "positions without rows": (
        lambda lm: lm.model(torch.tensor([[1, 2]]), torch.tensor([0, 1])),
        r"positions are int64 \(2,\)",
    ),
    "positions that are no integers": (
        lambda lm: lm.model(torch.tensor([[1, 2]]), torch.tensor([[0.0, 1.0]])),
        r"positions are float32 \(1, 2\)",
    ),
    "a cache that is none": (
        lambda lm: lm.model(torch.tensor([[1]]), torch.tensor([[0]]), "x"),
        "cache is str: give a KVCache",
    ),
    "a manager of rows for a paged cache": (
        lambda lm: onward.CacheManager(onward.PagedKVCache(lm.config, 1, 16, blocks=4)),
        "BlockManager",
    ),
    "a run without a folder": (lambda lm: onward.train("x.txt", None), "out is None"),
    "a run whose folder is not given": (lambda lm: onward.train("x.txt", steps=1), "train: out is missing"),  # type: ignore[call-arg]
    "fine-tuning whose folder is not given": (lambda lm: onward.finetune("x", "y", lora=1), "finetune: out is missing"),  # type: ignore[call-arg]
    "an option of a run that is none": (lambda lm: onward.train("x.txt", "r", stepz=1), "stepz .* did you mean steps"),  # type: ignore[call-arg]
    "a text as sources": (lambda lm: onward.train("A cat.\nA dog.", "runs/x"), "sources holds the text 'A cat.*paths"),
    "a number as sources": (lambda lm: onward.train(3, "runs/x"), "sources is 3"),  # type: ignore[arg-type]
    "a number as on_event": (lambda lm: onward.train("x.txt", "runs/x", 5), "on_event is 5"),  # type: ignore[arg-type]
    "no config": (lambda lm: onward.Decoder(None), "config is None: it takes DecoderConfig"),  # type: ignore[arg-type]
    "a table as config": (lambda lm: onward.Decoder({"d_model": 8}), "config is .*it takes DecoderConfig"),  # type: ignore[arg-type]
    "rows as text": (lambda lm: lm.engine(rows="2"), "rows is '2': it takes int"),
    "an argument that is none": (lambda lm: lm.engine(foo=1), "foo is not an argument: choose from cache, draft"),
    "bytes as text": (lambda lm: onward.save(lm, "x", shard_bytes="x"), "shard_bytes is 'x': it must be a number"),  # type: ignore[arg-type]
    "a zero byte in a path": (lambda lm: onward.save(lm, "a\0b"), "path is 'a.*': a path cannot contain a zero byte"),
    "a zero byte in a source": (lambda lm: onward.train("a\0b", "runs/x"), "sources is 'a.*': a path cannot"),
    "a part as text": (lambda lm: replace(lm.config, attention="self"), "attention is 'self': it takes Attention"),
    "no part": (lambda lm: replace(lm.config, attention=None), "attention is None: it takes Attention"),
    "a misspelled size": (lambda lm: replace(lm.config, d_modell=8), "DecoderConfig: d_modell .*did you mean d_model"),
    "rows of a cache as text": (lambda lm: onward.KVCache(lm.config, "1", 8), "rows is '1': it must be a whole number"),  # type: ignore[arg-type]
    "a cache without rows": (lambda lm: onward.KVCache(lm.config, 0, 8), "rows is 0: it must be a whole number from 1"),
    "no logits": (lambda lm: onward.next_token_distribution(lm, "a"), "logits is .*it takes Tensor"),  # type: ignore[arg-type]
    "logits of one row": (
        lambda lm: onward.next_token_distribution(torch.zeros(9), onward.Sampling()),
        r"logits are float32 \(9,\): give floating-point numbers \(B, V\)",
    ),
    "samplings of other rows": (
        lambda lm: onward.next_token_distribution(torch.zeros(2, 9), [onward.Sampling()]),
        "samplings has 1 for 2 rows",
    ),
    "a biased token beyond the logits": (
        lambda lm: onward.next_token_distribution(torch.zeros(1, 9), onward.Sampling(logit_bias={9: 1})),
        "logit_bias has token id 9",
    ),
    "a mask of numbers": (lambda lm: onward.Engine(lm.model, allowed=torch.ones(3)), r"allowed is float32 \(3,\)"),
    "tokens in place of batches": (lambda lm: onward.mean_loss(lm.model, torch.ones(1, 2)), "batches is"),  # type: ignore[arg-type]
    "a number in place of a batch": (lambda lm: onward.mean_loss(lm.model, iter([5])), "batch is 5: it takes Batch"),  # type: ignore[arg-type]
    "no tokenizer": (lambda lm: onward.Tokenizer.load(None), "path is None: it takes str"),  # type: ignore[arg-type]
    "a number as tokenizer": (lambda lm: onward.train_tokenizer(5, ["a"]), "spec is 5: it takes str"),  # type: ignore[arg-type]
    "a number as text of a tokenizer": (lambda lm: onward.train_tokenizer("char", iter([5])), "text is 5"),  # type: ignore[arg-type]
    "a text to decode": (lambda lm: lm.tokenizer.decode("abc"), "ids is 'abc'"),
    "a negative token": (lambda lm: lm.tokenizer.decode([-1]), r"ids is \[-1\]"),
    "positions of fewer tokens": (
        lambda lm: lm.model(torch.tensor([[1, 2]]), torch.tensor([[0]])),
        r"positions are int64 \(1, 1\): give integers \(B, 2\)",
    ),
    "positions as text": (lambda lm: lm.model(torch.tensor([[1, 2]]), "0 1"), "positions are str"),
    "hidden states of another width": (
        lambda lm: lm.model.logits(torch.zeros(1, 2, 5)),
        r"hidden is float32 \(1, 2, 5\)",
    ),
    "hidden states in another dtype": (
        lambda lm: lm.model.logits(torch.zeros(1, 2, 32, dtype=torch.float64)),
        r"hidden is float64 .* in torch.float32",
    ),
    "batches in place of plans": (
        lambda lm: [*onward.Trainer(lm.model, [], lambda step: 0.0).train([onward.Batch(*torch.ones(2, 1, 2))])],  # type: ignore[list-item]
        "plans is .*it takes Iterable",
    ),
    "a plan of no batches": (
        lambda lm: onward.Trainer(lm.model, [], lambda step: 0.0).train_step(onward.StepPlan(None)),  # type: ignore[arg-type]
        "plan.batches is None: it takes Sequence",
    ),
    "vectors of another width": (lambda lm: lm.model(torch.zeros(1, 2, 5)), r"vectors \(B, T, 32\)"),
    "an id beyond the vocabulary": (lambda lm: lm.model(torch.tensor([[1, 9999]])), "token id 9999 is out of range"),
}


@pytest.mark.filterwarnings("ignore::onward.text.chat.NoTemplate")
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_type_or_shape_is_one_sentence(case: str, lm: LanguageModel) -> None:
    call, message = WRONG[case]
    with pytest.raises(onward.UserError, match=message) as caught:
        call(lm)
    assert "\n" not in str(caught.value)


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
