"""The doctor checks tokenizers, chat templates and training texts."""

from pathlib import Path

import numpy as np
import pytest

import onward
from onward import Tokens, doctor
from onward.families._unread import UNREAD
from onward.inspection.doctor.checks import CHECKS, examine
from onward.inspection.doctor.corpus import CORPUS, Corpus
from onward.inspection.doctor.target import subjects_of

from support.planted import GPT, MUTANTS, ROOT, failures, model_of

# ---------------------------------------------------------------- tokenizers and texts

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEMPLATES = {  # a template, and the expected finding
    "right": (TEMPLATE, ""),
    "another prompt": (TEMPLATE.replace("%}<|assistant|>{% endif", "%}Assistant:{% endif"), "finished conversation"),
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
ENDED = np.where(np.arange(6000) % 100 == 99, 0, IDS).astype(np.uint16)  # documents of 100 tokens that end with token 0
HUNDREDS = np.arange(100, 6001, 100)
CORPORA = {  # a corpus, and the checks that should fail
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
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_experts": 4}
    config = transformers.DogeConfig(**sizes, **heads, max_position_embeddings=64, bos_token_id=0, eos_token_id=0)
    transformers.DogeForCausalLM(config).save_pretrained(tmp_path)
    assert "doge" in UNREAD
    [model] = subjects_of(str(tmp_path))
    assert failures([*examine(model)]) == {}


def test_page_lists_every_check_and_every_mutant() -> None:
    page = (ROOT / "docs/doctor.md").read_text(encoding="utf-8")
    checks = CHECKS | CORPUS
    assert [name for name, check in checks.items() if f"| {name} | {check.needs} | {check.how} |" not in page] == []
    assert [name for name in [*MUTANTS, *CORPORA] if name not in page and name != "healthy"] == []
