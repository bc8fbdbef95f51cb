"""A term from the glossary, or a command without its arguments, gives a helpful message."""

import re
from shlex import split

import pytest

import onward
from onward.cli import main

WAYS = {
    "what is attention": "onward help attention explains the term",
    "what is a kv cache": "onward help kv cache explains the term",
    "perplexitty": "is not a command",
    "'what is attention'": "onward help attention explains the term",
    "how does attention work": "onward help attention explains the term",
    "explain attention": "onward help attention explains the term",
    "explain attention head": "onward help attention head explains the term",
    "explain what attention is": "onward help attention explains the term",
    "learn 4 --notebook": "for example, write onward learn 4 --notebook 4.ipynb",
    "learn 4 --web": "for example, write onward learn 4 --web attention.html",
    "generate runs/mybook --image": "--image",
    "draw softmax": "onward help softmax explains the term, onward inspect MODEL TEXT shows the attention",
    "draw heads": "onward help heads explains the term",
    "draw foo": "choose from alibi,",
    "draw gpt2": "onward draw block gpt2 draws the blocks of this model",
    "plan llama": "onward models llama lists its releases",
    "draw block llama": "'llama' is a family and is not one release",
    "models diff llama mistral": "'llama' is a family and is not one release",
    "models bert": "Cannot read 'bert', because it is an encoder",
    "models foo": "'foo' is not a release that Onward knows: onward models lists the releases",
    "models diff gpt2 llama-2-7": "'llama-2-7' begins the names of several releases",
    "models diff gpt2 mistal-7b": "did you mean mistral-7b?",
    "learn nothing": "choose 1 (Next tokens)",
}


@pytest.mark.parametrize("line", WAYS)
def test_a_mistake_shows_the_way(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(split(line)) == 2
    [message] = capsys.readouterr().err.splitlines()
    assert WAYS[line] in message


FIRST = {
    "help loss": "cross-entropy (",
    "help kv": "KV cache (",
    "help what is attention": "attention (",
    "help how does attention work": "attention (",
    "learn attention": "Attention by hand",
    "learn what is attention": "Attention by hand",
    "learn the block": "The block",
    "learn rope": "Positions",
    "models llama-2": "llama: ",
}


@pytest.mark.parametrize("line", FIRST)
def test_a_term_leads_to_its_place(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 0
    first = capsys.readouterr().out.strip().splitlines()[0]
    assert FIRST[line] in first


def test_a_field_of_a_config_given_to_the_decoder_names_the_config() -> None:
    with pytest.raises(onward.UserError) as raised:
        onward.Decoder(vocab_size=50)  # type: ignore[call-arg]
    advice, filled = str(raised.value).partition("write ")[2], iter(["50", "16", "2", "4"])
    model = eval(
        re.sub(r"\.\.\.", lambda _: next(filled), advice),
        {name: getattr(onward, name) for name in ("Decoder", "DecoderConfig")},
    )
    assert (model.config.vocab_size, model.config.n_heads) == (50, 4)


def test_all_missing_arguments_are_named_at_once() -> None:
    with pytest.raises(onward.UserError, match="d_model and n_layers and n_heads are missing: give them"):
        onward.DecoderConfig(vocab_size=50)  # type: ignore[call-arg]
