"""A term from the glossary, or a command without its arguments, gives a helpful message."""

import pytest

import onward
from onward.cli import main

WAYS = {
    "what is attention": "onward help attention explains the term",
    "what is a kv cache": "onward help kv cache explains the term",
    "perplexitty": "is not a command",
    "explain attention": "onward help attention explains the term",
    "learn 4 --notebook": "for example, write onward learn 4 --notebook 4.ipynb",
    "learn 4 --web": "for example, write onward learn 4 --web attention.html",
    "generate runs/mybook --image": "--image",
    "draw softmax": "choose from alibi,",
    "learn nothing": "choose 1 (Next tokens)",
}


@pytest.mark.parametrize("line", WAYS)
def test_a_mistake_shows_the_way(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    [message] = capsys.readouterr().err.splitlines()
    assert WAYS[line] in message


FIRST = {
    "help loss": "cross-entropy (",
    "help kv": "KV cache (",
    "learn attention": "Attention by hand",
    "learn rope": "Positions",
    "models llama-2": "llama: ",
}


@pytest.mark.parametrize("line", FIRST)
def test_a_term_leads_to_its_place(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 0
    first = capsys.readouterr().out.strip().splitlines()[0]
    assert FIRST[line] in first


def test_a_field_of_a_config_given_to_the_decoder_names_the_config() -> None:
    with pytest.raises(onward.UserError, match=r"write Decoder\(DecoderConfig\(vocab_size=...\)\)"):
        onward.Decoder(vocab_size=50)  # type: ignore[call-arg]
