"""Modelfiles: chat templates that put a fixed text around each message are translated to Go templates."""

import re
from pathlib import Path

import pytest

import onward
from onward.checkpoint.gguf.modelfile import go_template, modelfile
from onward.text.chat import chat_of
from onward.text.templates import TEMPLATES, with_template

from support.decoders import DECODERS

TALK = [("system", "Be brief."), ("user", "Who?"), ("assistant", "Me."), ("user", 'Why "so"?\n')]


def rendered(template: str, talk: list[tuple[str, str]]) -> str:
    """Render a talk with the few constructs of Go's templates that are used here."""
    match = re.fullmatch(r"\{\{ range .Messages \}\}(.*)\{\{ end \}\}\{\{ end \}\}(.*)", template, re.DOTALL)
    assert match
    texts = lambda part: "".join(eval(text) for text in re.findall(r'\{\{ (".*?(?<!\\)") \}\}', part))
    turns = re.findall(r'if eq .Role "(\w+)" \}\}(.*?)\{\{ .Content \}\}(.*?)(?=\{\{ else|$)', match[1], re.DOTALL)
    around = {role: (texts(before), texts(after)) for role, before, after in turns}
    return "".join(content.join(around[role]) for role, content in talk) + texts(match[2])


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_of_a_modelfile_renders_the_same(name: str) -> None:
    tokenizer = with_template(onward.train_tokenizer("bpe:300", ["Once upon a time"]), name)
    template = go_template(tokenizer)
    text = modelfile(Path("x.gguf"), DECODERS["llama"], tokenizer)
    if name in ("mistral", "gemma"):  # their system message is part of the first user message
        assert template == ""
        assert "TEMPLATE" not in text
        return
    messages = [{"role": role, "content": content.strip()} for role, content in TALK]
    bos = tokenizer.inner.id_to_token(tokenizer.bos_id) if tokenizer.bos_id is not None else ""
    wanted = str(chat_of(tokenizer).text(messages)).removeprefix(bos)
    assert rendered(template, [(role, content.strip()) for role, content in TALK]) == wanted
    assert f'TEMPLATE """{template}"""' in text
