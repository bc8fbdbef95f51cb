"""A server with scripted answers: the next answer depends on the tool results in the conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import onward
from onward import Decoder, GenerationOptions, LanguageModel, train_tokenizer
from onward.serving import Service

from support.server import Running, serving

TEMPLATE = (
    "{% if tools %}[tools]{% for t in tools %}{{ t.function.name }} {% endfor %}Call as <tool_call>.{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("cities", {"country": "Italy"}),
    ("weather", {"city": "Rome", "days": 3}),
    ("book", {"city": "Rome"}),
]
FINAL = "Rome, by train. É bella!"
HELLO = "Hello, traveler."


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """A tool call in the template's format."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def scripted(prompt: str) -> str | None:
    """The scripted answer to a conversation: the next call, or the final answer after all calls; None if there is no
    script."""
    if "Where shall I go?" in prompt:
        done = prompt.count("[tool]")
        return call_text(*CALLS[done]) if done < len(CALLS) else FINAL
    return HELLO if "Hello" in prompt else None


@contextmanager
def scripted_server(folder: Path) -> Iterator[Running]:
    """Serve a tiny model with random weights under the name `caller`; if `scripted` gives an answer, a constraint
    allows only this answer."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer("byte", ["a"])
    tokenizer.templates["default"] = TEMPLATE
    config = onward.DecoderConfig(tokenizer.vocab_size, d_model=32, n_layers=1, n_heads=2, context_length=2048)
    onward.save(LanguageModel(Decoder(config).eval(), tokenizer), folder / "caller")
    submit = Service.submit

    def scripted_submit(
        self: Service, account: Any, served: Any, prompts: Any, options: GenerationOptions, *rest: Any
    ) -> Any:
        answer = scripted(served.lm.text().decode(prompts[0]))
        if answer is not None:
            options = replace(options, regex=re.escape(answer), json_schema="", grammar="")
        return submit(self, account, served, prompts, options, *rest)

    with pytest.MonkeyPatch.context() as patch, serving(folder / "caller", rows=4) as running:
        patch.setattr(Service, "submit", scripted_submit)
        yield running
