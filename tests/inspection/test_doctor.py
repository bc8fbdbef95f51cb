"""The doctor finds each planted bug by its check, and nothing in healthy models."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import onward
from onward.cli import main
from onward.cli.train import examine as examine_run
from onward.data.tokens import Tokens
from onward.errors import UserError
from onward.inspection.doctor import Finding, doctor
from onward.inspection.doctor.checks import CHEAP, CHECKS, examine
from onward.inspection.doctor.corpus import CORPUS, Corpus
from onward.inspection.doctor.isolated import examine_apart
from onward.inspection.doctor.target import subjects_of
from onward.model.decoder import Decoder
from onward.training.config import RunConfig

from support.decoders import DECODERS, decoder
from support.pages import Page

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/planted_bug.py"
GPT = EXAMPLE.read_text(encoding="utf-8").replace("key > query + 1", "key > query")
LLAMA = (ROOT / "tests/support/single_file.py").read_text(encoding="utf-8")
MASK = 'scores = scores.masked_fill(key > query, float("-inf"))'
CROSS_ENTROPY = "logits.flatten(0, 1), targets.flatten()"
ROUTED = "weights = weights / weights.sum(-1, keepdim=True)"
REPEATED = "k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)"
TILED = "k, v = k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1)"
# name: the model, the lines and what stands there instead, the check that finds it, and a part of what is said
MUTANTS: dict[str, tuple[str, dict[str, str], str, str]] = {
    "no mask": (GPT, {MASK: "pass"}, "causal", "first in blocks.0.attention"),
    "mask off by one": (GPT, {"key > query": "key > query + 1"}, "causal", "first in blocks.0.attention"),
    "mask of the queries": (GPT, {"key > query": "key < query"}, "causal", "blocks.0.attention"),
    "softmax over the queries": (GPT, {"scores.softmax(-1)": "scores.softmax(-2)"}, "causal", "blocks.0.attention"),
    "mask that hides the query's own key": (GPT, {"key > query": "key >= query"}, "finite", "blocks.0.attention"),
    "logarithm of what is negative": (GPT, {"head(self.norm(x))": "head(self.norm(x).log())"}, "finite", "head"),
    "dropout in eval": (GPT, {"self.dropout, self.training)": "0.1)"}, "repeatable", "F.dropout"),
    "dropout that never acts": (GPT, {"self.dropout, self.training)": "self.dropout, False)"}, "modes", "nothing"),
    "norm over the batch": (
        GPT,
        {"head(self.norm(x))": "head(self.norm(self.batch(x.transpose(1, 2)).transpose(1, 2)))"}
        | {"self.norm = nn": "self.batch = nn.BatchNorm1d(width); self.norm = nn"},
        "modes",
        "BatchNorm1d",
    ),
    "attention that is never added": (
        GPT,
        {"x = x + self.attention(self.norm1(x), memory)": "self.attention(self.norm1(x), memory)"},
        "context",
        "changes later logits by 0.0e+00",
    ),
    "batch and heads mixed": (GPT, {".transpose(1, 2).reshape(B, T": ".transpose(0, 1).reshape(B, T"}, "rows", ""),
    "mean over the batch": (GPT, {"head(self.norm(x))": "head(self.norm(x + x.mean(0)))"}, "rows", ""),
    "padding attended to": (
        LLAMA,
        {"allowed = allowed & attention_mask[:, None, None].bool()": "pass"},
        "padding",
        "other padding tokens change logits",
    ),
    "positions counted from the end": (
        GPT,
        {"torch.arange(past, past + tokens.size(1))": "torch.arange(past + tokens.size(1) - 1, past - 1, -1)"},
        "padding",
        "tokens after a text change its logits",
    ),
    "rotary on values": (
        LLAMA,
        {"q, k = rotate(q, places), rotate(k, places)": "q, k, v = (rotate(x, places) for x in (q, k, v))"},
        "positions",
        "first in layers.0.attention",
    ),
    "table of positions too short": (GPT, {"nn.Embedding(context_length,": "nn.Embedding(20,"}, "length", "IndexError"),
    "residual stream with a large offset": (
        GPT,
        {"for layer, block in": "x = x + 300\n        for layer, block in"},
        "precision",
        "blocks.0",
    ),
    "mask with the wrong offset in a cached chunk": (
        GPT,
        {"arange(past, past + T)[:": "arange(T)[:"},
        "cached",
        "in blocks.0.attention",
    ),
    "no mask for cached chunks": (GPT, {"key > query": "(key > query) & (past == 0)"}, "cached", "in chunks of 5"),
    "positions not advanced with the cache": (
        GPT,
        {"torch.arange(past, past + tokens.size(1))": "torch.arange(tokens.size(1))"},
        "cached",
        ", in position",
    ),
    "rotary positions restarted in the cache": (
        LLAMA,
        {"places = torch.arange(past, past + T,": "places = torch.arange(T,"},
        "cached",
        "in layers.0.attention",
    ),
    "cache that forgets": (GPT, {'torch.cat([memory["k"], k], 2)': 'torch.cat([memory["k"] * 0, k], 2)'}, "cached", ""),
    "values that are not taken back": (
        LLAMA,
        {"v[:, :, :length] for v": "v[:, :, : length + 4] for v"},
        "rolled back",
        "",
    ),
    "repeated heads in the cache": (
        LLAMA,
        {
            REPEATED: "pass",
            "q, k = rotate(q, places), rotate(k, places)": "q, k = rotate(q, places), rotate(k, places)\n"
            "        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)",
        },
        "cache memory",
        "2 times",
    ),
    "cached step that reads the whole text": (
        LLAMA,
        {
            "x = self.embed(tokens)": "self.text = torch.cat([self.text, tokens], 1) if past else tokens\n"
            "        _ = self(self.text) if past else None\n        x = self.embed(tokens)"
        },
        "speed",
        "times the numbers",
    ),
    "embedding scaled twice": (
        LLAMA,
        {"math.sqrt(self.embed.embedding_dim)": "self.embed.embedding_dim"},
        "embedding",
        "5.657 twice",
    ),
    "norm missing on one branch": (
        LLAMA,
        {"self.mlp(self.mlp_norm(x))": "self.mlp(x)"},
        "norms",
        "layers.0.mlp",
    ),
    "norm that is made and not used": (
        LLAMA,
        {"self.mlp(self.mlp_norm(x))": "self.mlp(x)"},
        "gradients",
        "layers.0.mlp_norm.weight",
    ),
    "key/value heads repeated in the wrong order": (
        LLAMA,
        {REPEATED: TILED},
        "heads",
        r"[0, 1, 0, 1], and not [0, 0, 1, 1]",
    ),
    "values repeated in another order than keys": (
        LLAMA,
        {REPEATED: TILED.replace("k.repeat(1, groups, 1, 1)", "k.repeat_interleave(groups, 1)")},
        "heads",
        "the values of the key/value heads [0, 1, 0, 1]",
    ),
    "scale missing": (LLAMA, {" / math.sqrt(k.size(-1))": ""}, "heads", "the scale is missing"),
    "scale of the whole width": (GPT, {"math.sqrt(k.size(-1))": "math.sqrt(D)"}, "heads", "of the whole width"),
    "router whose weights are not normalized": (LLAMA, {ROUTED: "pass"}, "experts", "layers.1.mlp"),
    "targets shifted twice": (
        GPT,
        {CROSS_ENTROPY: "logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten()"},
        "loss",
        "targets 1 ahead",
    ),
    "targets not shifted": (
        LLAMA,
        {"logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()": "logits.flatten(0, 1), labels.flatten()"},
        "loss",
        "targets 0 ahead",
    ),
    "loss over the wrong axis": (
        GPT,
        {CROSS_ENTROPY: "logits.reshape(len(tokens), -1, tokens.size(1)), targets"},
        "loss",
        "is that over the wrong axis",
    ),
    "sum instead of mean": (GPT, {"targets.flatten())": 'targets.flatten(), reduction="sum")'}, "loss", "the sum over"),
    "initialization far too large": (GPT, {"std=0.02": "std=1.0"}, "first loss", ""),
    "one layer initialized otherwise": (
        LLAMA,
        {"std=0.02)": 'std=0.4 if "layers.1.attention.wo" in name else 0.02)'},
        "initialization",
        "layers.1.attention.wo.weight",
    ),
    "detached layer": (GPT, {"self.mlp(self.norm2(x))": "self.mlp(self.norm2(x)).detach()"}, "gradients", "mlp"),
    "untied head that claims to be tied": (
        GPT,
        {"self.head.weight = self.embed.weight": "pass"},
        "tied",
        "two matrices",
    ),
    "residual stream cut": (GPT, {"return x + self.mlp(self.norm2(x))": "return 0 * x"}, "overfit", ""),
}


def model_of(source: str, **sizes: int) -> nn.Module:
    """The model in the source of a file."""
    names: dict[str, Any] = {"__name__": "patient"}
    exec(compile(source, "patient.py", "exec"), names)
    torch.manual_seed(0)
    model: nn.Module = names["GPT"](**sizes)
    return model


def planted(name: str, **sizes: int) -> nn.Module:
    """The model with this bug."""
    source, lines, _, _ = MUTANTS[name]
    for line, instead in lines.items():
        assert source.count(line) == 1, line
        source = source.replace(line, instead)
    return model_of(source, **sizes)


def failures(found: list[Finding]) -> dict[str, str]:
    """The checks that fail, each with what is said."""
    return {f.check: f"{f.what}; {f.where}; {f.why}; {f.mend}; {f.how}" for f in found if f.status == "failed"}


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_is_found_and_named(name: str) -> None:
    *_, check, said = MUTANTS[name]
    found = failures(doctor(planted(name), fresh=True, checks=[check]))
    assert found.keys() == {check}
    assert said in found[check]


def test_loss_over_the_wrong_axis_is_found_where_both_axes_are_as_long() -> None:
    assert "loss" in failures(doctor(planted("loss over the wrong axis", vocab_size=16), fresh=True, checks=["loss"]))


HEALTHY: dict[str, Callable[[], nn.Module]] = {
    "a GPT in one file": lambda: model_of(GPT),
    "a GPT in one file that returns all logits for targets only": lambda: model_of(
        GPT.replace("            return logits\n", "            return logits[:, -1:]\n")
    ),
    "a Llama in one file": lambda: model_of(LLAMA),
    **{name: lambda name=name: decoder(DECODERS[name]) for name in DECODERS},  # type: ignore[misc]
}


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_in(name: str) -> None:
    assert failures(doctor(HEALTHY[name](), fresh="in one file" in name)) == {}


@pytest.mark.parametrize("name", ["a GPT in one file", "a Llama in one file"])
def test_checks_apply_to(name: str) -> None:
    lacking = {f.check for f in doctor(HEALTHY[name](), fresh=True) if f.status == "not applicable"}
    trained = {"targets", "offset", "repetition", "tokenizer", "chat template"}
    assert lacking == trained | ({"rolled back", "experts"} if "GPT" in name else {"tied"})


@pytest.mark.long
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "not fresh"])
@pytest.mark.parametrize("kind", ["GPT2", "Llama", "GPTNeoX", "Mistral", "Qwen2", "Gemma2", "Mixtral", "OPT", "Bloom"])
def test_nothing_is_found_in_transformers(kind: str, fresh: bool) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 64, "max_position_embeddings": 64, "num_key_value_heads": 2, "head_dim": 8}
    if kind in ("GPT2", "Bloom"):
        sizes = {"vocab_size": 61, "n_embd": 32, "hidden_size": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    assert failures(doctor(transformers.AutoModelForCausalLM.from_config(config), fresh=fresh)) == {}


@pytest.mark.parametrize("preset", ["tiny", "mini", *(pytest.param(p, marks=pytest.mark.long) for p in ("small",))])
def test_cheap_half_finds_nothing_before_the_first_step_of_a_preset(preset: str) -> None:
    torch.manual_seed(0)
    said = before_training(Decoder(RunConfig(sources=("embedded",), preset=preset).decoder(300)))
    assert said == [f"ok    {len(CHEAP)} checks of the doctor find nothing in the model"]


def test_cheap_half_names_a_bug_before_the_first_step_only() -> None:
    model = decoder(DECODERS["llama"])
    model.blocks[0].register_forward_hook(lambda module, args, x: x + x.roll(-1, 1))
    assert before_training(model)[0].startswith(
        "look  causal: changing the tokens from 6 on changes logits before them"
    )
    assert before_training(model, step=1) == []


def before_training(model: nn.Module, step: int = 0) -> list[str]:
    """What `onward train` says of a model."""
    said: list[str] = []
    run: Any = SimpleNamespace(model=model, step=step, fresh=True)
    examine_run(run, lambda sentence: said.append(str(sentence)))
    return said


# ---------------------------------------------------------------- what is known beside the model


def learned(shift: int) -> nn.Module:
    """A GPT that was trained on counting texts, with targets that are `shift` tokens ahead."""
    model = model_of(GPT.replace("0.1)", "0.0)"), width=16, layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(60):
        tokens = counting()
        F.cross_entropy(model(tokens)[:, : 17 - shift].flatten(0, 1), tokens[:, shift:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def counting() -> Tensor:
    """Texts (8, 17) in which each token is the one before plus one."""
    return (torch.randint(61, (8, 1)) + torch.arange(17)) % 61


@pytest.fixture(scope="module")
def copier() -> nn.Module:
    return learned(0)


@pytest.mark.parametrize("check", ["offset", "repetition"])
def test_model_that_was_trained_to_copy_is_found(copier: nn.Module, check: str) -> None:
    tokens = counting()
    about = {"trained": True, "batches": [(tokens[:, :-1], tokens[:, 1:])]}
    found = failures(doctor(copier, checks=[check], **about))  # type: ignore[arg-type]
    assert re.search(
        {"offset": r"offset \+0 is predicted best", "repetition": "repeats its last token"}[check], found[check]
    )


def test_model_that_was_trained_to_predict_is_not() -> None:
    tokens = counting()
    about = {"trained": True, "batches": [(tokens[:, :-1], tokens[:, 1:])]}
    found = doctor(learned(1), checks=["offset", "repetition"], **about)  # type: ignore[arg-type]
    assert [f.status for f in found] == ["ok", "told"]


@pytest.mark.parametrize(("shift", "where"), [(0, "the token itself"), (2, "after the next"), (1, "")])
def test_batches_are_checked_for_targets_at(shift: int, where: str) -> None:
    tokens = counting()
    [found] = doctor(model_of(GPT), checks=["targets"], batches=[(tokens[:, :15], tokens[:, shift : 15 + shift])])
    assert (found.status == "ok") == (shift == 1)
    assert where in found.where


def test_loss_that_is_given_is_checked() -> None:
    right = lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten())
    wrong = lambda z, y: F.cross_entropy(z[:, :-1].flatten(0, 1), y[:, 1:].flatten())
    found = [doctor(model_of(GPT), checks=["loss"], loss=loss)[0] for loss in (right, wrong)]
    assert [(f.status, f.where) for f in found] == [
        ("ok", ""),
        ("failed", "it is that of targets 1 ahead of the logits"),
    ]


def test_loss_without_a_mean_and_broken_pattern_are_named() -> None:
    every = lambda z, y: F.cross_entropy(z.transpose(1, 2), y, reduction="none")
    [found] = doctor(model_of(GPT), checks=["loss"], loss=every)
    assert (found.status, found.what) == ("failed", "the loss has the shape (2, 16)")
    with pytest.raises(UserError, match="frozen is '\\[', and no pattern"):
        doctor(model_of(GPT), frozen="[")


def test_cache_that_is_given_is_checked() -> None:
    def kept(model: nn.Module) -> Callable[[Tensor], Tensor]:
        text = torch.empty(1, 0, dtype=torch.long)

        def step(tokens: Tensor) -> Tensor:
            nonlocal text
            text = torch.cat([text, tokens], 1)
            return model(text)[:, -tokens.size(1) :]  # type: ignore[no-any-return]

        return step

    found = {f.check: f.status for f in doctor(model_of(GPT), checks=["cached", "speed"], cache=kept)}
    assert found == {"cached": "ok", "speed": "failed"}


def test_parameter_that_should_be_frozen_is_named() -> None:
    [found] = doctor(model_of(GPT), checks=["gradients"], frozen=r"^embed|mlp\.0\.bias")
    assert found.status == "failed"
    assert "blocks.0.mlp.0.bias, blocks.1.mlp.0.bias, embed.weight" in found.where


def test_model_is_left_as_it_was() -> None:
    model, state = model_of(GPT), torch.random.get_rng_state()
    model.train()
    model.blocks[0].eval()  # type: ignore[index, union-attr]
    before = {name: p.clone() for name, p in model.state_dict().items()}
    onward.doctor(model, fresh=True)
    assert [module.training for module in model.children()] == [True] * len([*model.children()])
    assert not model.blocks[0].training  # type: ignore[index, union-attr]
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    assert torch.equal(state, torch.random.get_rng_state())


def test_adapter_says_how_a_model_is_called() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model_of(GPT)

        def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"out": self.inner(batch["ids"])}

    adapter = lambda model, tokens: model({"ids": tokens})["out"]
    assert failures(doctor(Named(), adapter=adapter, checks=["causal", "cached", "loss", "padding"])) == {}


# ---------------------------------------------------------------- tokenizers and texts

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEMPLATES = {  # a template, and what is found
    "right": (TEMPLATE, ""),
    "another prompt": (TEMPLATE.replace("%}<|assistant|>{% endif", "%}Assistant:{% endif"), "in training"),
    "no end": (TEMPLATE.replace("{{ eos_token }}", ""), "never closes the assistant's turn"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_template_is_compared_with_trained_turns(name: str) -> None:
    template, said = TEMPLATES[name]
    tokenizer = onward.train_tokenizer("byte", [])
    tokenizer.templates = {"default": template}
    [found] = doctor(model_of(GPT), checks=["chat template"], tokenizer=tokenizer)
    assert (found.status == "ok") == (not said), found
    assert said in f"{found.what} {found.where}"


def test_tokenizer_with_more_ids_than_the_model_is_found() -> None:
    tokenizer = onward.train_tokenizer("byte", [])
    statuses = [
        doctor(model_of(GPT, vocab_size=size), checks=["tokenizer"], tokenizer=tokenizer)[0].status
        for size in (tokenizer.vocab_size - 1, tokenizer.vocab_size, tokenizer.vocab_size + 7)
    ]
    assert statuses == ["failed", "ok", "ok"]


IDS = np.random.default_rng(0).integers(1, 400, 6000).astype(np.uint16)
ENDED = np.where(np.arange(6000) % 100 == 99, 0, IDS).astype(
    np.uint16
)  # documents of 100 tokens, the last of which is 0
HUNDREDS = np.arange(100, 6001, 100)
CORPORA = {  # a corpus, and the checks that fail
    "healthy": (Corpus(Tokens.of(ENDED, HUNDREDS), Tokens.of(IDS[::-1].copy()), (0,)), set()),
    "duplicates": (Corpus(Tokens.of(ENDED, HUNDREDS), Tokens.of(ENDED[1000:3000]), (0,)), {"duplicates"}),
    "documents that never end": (Corpus(Tokens.of(IDS, HUNDREDS), None, (0,)), {"documents end"}),
    "one document that dominates": (Corpus(Tokens.of(ENDED, HUNDREDS[30:]), None, (0,)), {"one document"}),
}


@pytest.mark.parametrize("name", CORPORA)
def test_corpus_is_examined(name: str) -> None:
    corpus, failed = CORPORA[name]
    assert {finding.check for finding in examine(corpus) if finding.status == "failed"} == failed


def test_run_is_examined_with_its_texts(tiny_run: Path) -> None:
    model, corpus = subjects_of(str(tiny_run))
    found = [*examine(model), *examine(corpus)]
    assert failures(found) == {}
    applied = {finding.check for finding in found if finding.status != "not applicable"}
    assert applied >= {"offset", "repetition", "tokenizer", "duplicates", "one document"}


@pytest.mark.long
def test_folder_of_a_family_that_only_transformers_has_is_examined(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
    config = transformers.CodeGenConfig(**sizes, bos_token_id=0, eos_token_id=0)
    transformers.CodeGenForCausalLM(config).save_pretrained(tmp_path)
    [model] = subjects_of(str(tmp_path))
    assert failures([*examine(model)]) == {}


# ---------------------------------------------------------------- the command

WRONG: dict[str, tuple[str, str]] = {  # the target and its options, and the sentence
    "no file": ("nowhere.py:GPT", "there is no file nowhere.py"),
    "no module": ("nowhere:GPT", "nowhere cannot be imported"),
    "no such class": ("FILE:GTP", "the target names 'GTP', which .* does not have: choose from .*Raises"),
    "arguments that are no JSON": ("FILE:Raises {", "--kwargs is no JSON"),
    "unknown arguments": ('FILE:Raises {"x": 1}', "cannot be made .*unexpected keyword argument 'x'.*--kwargs"),
    "no model": ("FILE:number", "gives int: name a torch.nn.Module"),
    "a model that raises": ("FILE:Raises", "cannot be called with token ids .*no tokens, please.*--adapter"),
    "a model of vectors": ("FILE:vectors", "cannot be called with token ids .*--adapter"),
    "no logits": ("FILE:Flat", r"returns \(1, 2\) instead of logits"),
    "more logits than token ids": ("FILE:Wide", "token ids of up to .*--vocab-size if it has fewer"),
}
FILE = """
import sys
import torch

class Raises(torch.nn.Module):
    def forward(self, x): raise TypeError("no tokens, please")

class Flat(torch.nn.Module):
    def forward(self, x): return x

class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 90)
    def forward(self, x): return self.head(self.embed(x))

class Hangs(torch.nn.Module):
    def forward(self, x):
        while True: pass

class Grows(torch.nn.Module):
    def forward(self, x):
        print("noise")
        kept = []
        while True: kept.append(bytearray(1 << 26))

class Leaves(torch.nn.Module):
    def forward(self, x): sys.exit(0)

vectors = lambda: torch.nn.Linear(3, 3)
number = lambda: 5
"""


@pytest.mark.parametrize("case", WRONG)
def test_target_that_cannot_be_examined_is_one_sentence(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "file.py").write_text(FILE)
    given, message = WRONG[case]
    target, _, kwargs = given.replace("FILE", str(tmp_path / "file.py")).partition(" ")
    with pytest.raises(UserError, match=message) as caught:
        subjects_of(target, kwargs)
    assert "\n" not in str(caught.value)


BATCH = torch.zeros(2, 3, dtype=torch.long)


@pytest.mark.parametrize("batch", [BATCH, (BATCH, BATCH[:1]), (BATCH.float(), BATCH), (BATCH + 99, BATCH)])
def test_batch_that_is_none_is_one_sentence(batch: Any) -> None:
    with pytest.raises(UserError, match=r"a batch is|a batch has|batches is"):
        doctor(model_of(GPT), batches=[batch])


def test_model_without_end_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(FILE)
    with pytest.raises(UserError, match=r"the model took longer than 0\.1 s, before the first check"):
        examine_apart({"target": f"{tmp_path}/file.py:Hangs"}, seconds=0.1, gigabytes=1)


def test_command_finds_the_planted_bug(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "<page>.html"
    assert main(["doctor", f"{EXAMPLE}:GPT", "--json", "--html", str(page)]) == 1
    rows = json.loads(capfd.readouterr().out)
    failed = {row["check"]: row for row in rows if row["status"] == "failed"}
    assert failed.keys() == {"causal", "cached"}
    assert failed["causal"]["where"].startswith("first in blocks.0.attention")
    written = Page(page.read_text(encoding="utf-8"))
    assert not written.open
    assert all(row["what"] in written.text and row["how"] in written.text for row in rows)
    assert all(row["mend"] in written.text and row["where"] in written.text for row in failed.values())


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "message"),
    [("Grows", "cannot be called with token ids .*MemoryError"), ("Leaves", "ended with status 0, .*sys.exit")],
)
def test_command_bounds_what_a_model_does(
    name: str, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file.py").write_text(FILE)
    assert main(["doctor", f"{tmp_path}/file.py:{name}", "--gigabytes", "1"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert re.search(message, err)


def test_page_lists_every_check_and_every_mutant() -> None:
    page = (ROOT / "docs/doctor.md").read_text(encoding="utf-8")
    checks = CHECKS | CORPUS
    assert [name for name, check in checks.items() if f"| {name} | {check.needs} | {check.how} |" not in page] == []
    assert [name for name in [*MUTANTS, *CORPORA] if name not in page and name != "healthy"] == []
