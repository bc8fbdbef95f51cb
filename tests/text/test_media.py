"""Prompts with image tokens are refused with the token's name, in every kind of prompt."""

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

import onward
from onward import LanguageModel, UserError, train_tokenizer
from onward.base.files import read_json, write_json
from onward.cli import main
from onward.generation.prompts import prompt_tokens
from onward.text import Chat

from support.decoders import config, decoder
from support.server import serving

IMAGE, REFUSED = "<|image_pad|>", r"Cannot read '<\|image_pad\|>' in a prompt"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if image %}<|image_pad|>{% endif %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose config.json names an image token."""
    folder = tmp_path_factory.mktemp("sees")
    tokenizer = train_tokenizer("byte", [])
    tokenizer.inner.add_special_tokens([IMAGE])
    size = tokenizer.inner.get_vocab_size()
    model = decoder(config(vocab_size=size, context_length=64))
    tokenizer.templates = {"default": TEMPLATE}
    onward.save(LanguageModel(model, tokenizer), folder)
    text = read_json(folder / "config.json")
    outer = {"model_type": "any_vision", "image_token_index": size - 1, "text_config": text}
    write_json(folder / "config.json", outer)
    return folder


@pytest.fixture(scope="module")
def lm(folder: Path) -> LanguageModel:
    return onward.load(folder)


WAYS: dict[str, Callable[[LanguageModel], object]] = {
    "a text": lambda lm: lm.generate(f"See {IMAGE}", max_new_tokens=1),
    "token ids": lambda lm: prompt_tokens(lm.text(), [5, lm.text().vocab_size - 1]),
    "a message": lambda lm: list(lm.stream_chat([{"role": "user", "content": IMAGE}], max_new_tokens=1)),
    "a template": lambda lm: Chat(lm.text()).encode("See", image=True),
}


@pytest.mark.filterwarnings("ignore::onward.checkpoint.names.LeftOut")
@pytest.mark.parametrize("way", WAYS)
def test_image_in_a_prompt_is_refused(way: str, lm: LanguageModel) -> None:
    with pytest.raises(UserError, match=REFUSED):
        WAYS[way](lm)
    assert lm.generate("See", max_new_tokens=1, seed=1)


@pytest.mark.filterwarnings("ignore::onward.checkpoint.names.LeftOut")
def test_image_is_refused_after_saving_too(lm: LanguageModel, tmp_path: Path) -> None:
    onward.save(lm, tmp_path)
    with pytest.raises(UserError, match=REFUSED):
        onward.load(tmp_path).generate(IMAGE)


@pytest.mark.filterwarnings("ignore::onward.checkpoint.names.LeftOut")
def test_command_and_server_refuse_an_image(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(folder), IMAGE, "--max-new-tokens", "1"]) != 0
    assert "Cannot read '<|image_pad|>' in a prompt" in " ".join(capsys.readouterr().err.split())
    message = {"role": "user", "content": IMAGE}
    with serving(folder, rows=1) as server:
        for path, body in ("/v1/completions", {"prompt": IMAGE}), ("/v1/chat/completions", {"messages": [message]}):
            reply: httpx.Response = server.post(path, max_tokens=1, **body)
            assert reply.status_code == 400
            assert "Cannot read '<|image_pad|>' in a prompt" in reply.json()["error"]["message"]
