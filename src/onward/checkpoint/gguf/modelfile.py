"""Modelfiles, from which ollama imports a GGUF file or an adapter: `ollama create NAME -f Modelfile`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from onward.base.errors import UserError
from onward.config.decoder import DecoderConfig
from onward.text.chat import chat_of
from onward.text.tokenizer import Tokenizer

USER, ASSISTANT, SYSTEM = "user", "assistant", "system"


def modelfile(path: Path, c: DecoderConfig, tokenizer: Tokenizer | None, adapter: Path | None = None) -> str:
    """The Modelfile of a GGUF file, and of an adapter for it. Without a chat template, ollama continues the prompt as
    it is. If the chat template has no equivalent in Go, the Modelfile contains none, and ollama uses the GGUF file's
    template if it recognizes it."""
    lines = [f"FROM ./{path.name}", *([f"ADAPTER ./{adapter.name}"] if adapter else [])]
    lines.append(f"PARAMETER num_ctx {c.context_length}")
    if tokenizer is not None:
        lines += [f"PARAMETER stop {json.dumps(tokenizer.inner.id_to_token(i))}" for i in tokenizer.end_ids]
    if tokenizer is None or not tokenizer.templates:
        lines.append("TEMPLATE {{ .Prompt }}")
    elif template := go_template(tokenizer):
        lines.append(f'TEMPLATE """{template}"""')
    else:
        lines.append("# The chat template is that of the GGUF file: it is not a fixed text around each message.")
    return "\n".join(lines) + "\n"


def go_template(tokenizer: Tokenizer) -> str:
    """The chat template in ollama's format, a Go template; "" if it is not a fixed text around each message of a
    role. The token that begins a text, such as <s>, is left out: ollama adds it."""
    chat, bos = (
        chat_of(tokenizer),
        tokenizer.inner.id_to_token(tokenizer.bos_id) if tokenizer.bos_id is not None else "",
    )

    def render(roles: Sequence[str], answer: bool = False) -> str:
        messages = [{"role": role, "content": f"\ue000{i}"} for i, role in enumerate(roles)]
        return str(chat.text(messages, answer)).removeprefix(bos or "")

    try:
        one, two, first = render([USER]), render([USER, ASSISTANT, USER]), render([SYSTEM, USER])
        parts = {USER: one.split("\ue0000")}
        before, after = parts[USER]
        parts[ASSISTANT] = two.removeprefix(one).removesuffix(f"{before}\ue0002{after}").split("\ue0001")
        parts[SYSTEM] = first.removesuffix(f"{before}\ue0001{after}").split("\ue0000")
        start = render([USER], True).removeprefix(one)
        for roles in ([USER], [SYSTEM, USER, ASSISTANT, USER], [USER, ASSISTANT] * 2 + [USER]):
            texts = (f"\ue000{i}".join(parts[role]) for i, role in enumerate(roles))
            if "".join(texts) + start != render(roles, True):
                return ""
    except (UserError, ValueError):
        return ""
    quoted = lambda text: f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if text else ""
    turns = [
        f'{{{{ {"else " * (i > 0)}if eq .Role "{role}" }}}}{quoted(one)}{{{{ .Content }}}}{quoted(two)}'
        for i, (role, (one, two)) in enumerate(parts.items())
    ]
    return f"{{{{ range .Messages }}}}{''.join(turns)}{{{{ end }}}}{{{{ end }}}}{quoted(start)}"
