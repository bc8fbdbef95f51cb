"""Models with scripted answers: tiny models whose chat templates have a format of calls and of reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

import onward
from onward import Decoder, LanguageModel
from onward.serving.calls.markers import MARKERS, Markers

from support.calls import encoded, tokenizer_of
from support.server import Running

HTTP = httpx.Client(timeout=60)
MESSAGES = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}(hm {{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% endfor %}"
)
SHOWN = {  # text by which each format is recognized in a chat template
    "hermes": "<tool_call></tool_call>",
    "mistral": "[TOOL_CALLS] [",
    "mistral_args": "[TOOL_CALLS]name[ARGS]",
    "llama3_json": "<|python_tag|>",
    "qwen3_coder": "<tool_call><function=f></function></tool_call>",
    "harmony": "<|start|>system<|message|>channels<|channel|>",
    "json": "",
    "hermes-think": "<tool_call></tool_call>{# <think> #}",
    "open-think": "<tool_call></tool_call>",
    "mistral-think": "[TOOL_CALLS][THINK]",
}
ORDER = re.compile(  # of the events of an item in a stream of /v1/responses
    r"output_item\.added ((function_call_arguments)(\.delta \2)*\.done"
    r"|content_part\.added (output_text|reasoning_text)(\.delta \4)*\.done content_part\.done) output_item\.done"
)
BEGINS = {"open-think": "<think>\n", "harmony": "<|start|>assistant"}  # beginning of an answer, written by the template


def template_of(name: str) -> str:
    """The chat template of the model with this name."""
    shown = f"{{% if tools %}}{{{{ tools | tojson }}}}{SHOWN[name]}{{% endif %}}"
    begin = BEGINS.get(name, "[assistant]")
    return f"{shown}{MESSAGES}{{% if add_generation_prompt %}}{begin}{{% endif %}}"


def talker(folder: Path, name: str, controls: bool, texts: Sequence[str] = ()) -> Path:
    """Save a model with random weights and the chat template of this name; return its folder. Its vocabulary is trained
    on the texts; with `controls`, the markers are control tokens."""
    torch.manual_seed(0)
    tokenizer = tokenizer_of("bpe:600", texts, MARKERS if controls else ())
    tokenizer.templates["default"] = template_of(name)
    config = onward.DecoderConfig(tokenizer.vocab_size, d_model=16, n_layers=1, n_heads=1, context_length=2048)
    onward.save(LanguageModel(Decoder(config).eval(), tokenizer), folder / name)
    return folder / name


@dataclass
class Reply:
    """A reply from either route, complete or streamed: its reasoning, its content, (name, arguments) of its calls, and
    its finish reason. `kinds` are the kinds of the pieces of a stream, in order."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    kinds: list[str] = field(default_factory=list)

    def add(self, delta: dict[str, Any]) -> None:
        """Add a message, or a piece of a message."""
        self.reasoning += delta.get("reasoning_content") or ""
        self.content += delta.get("content") or ""
        self.kinds += [name for name in ("reasoning_content", "content") if delta.get(name)]
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            if "name" in function:
                assert call["id"].startswith("call_")
                assert call["type"] == "function"
                assert call.get("index", len(self.calls)) == len(self.calls)
                self.calls.append((function["name"], ""))
            self.calls[-1] = self.calls[-1][0], self.calls[-1][1] + function["arguments"]
            self.kinds.append("call" if "name" in function else "arguments")

    @property
    def parts(self) -> tuple[Any, ...]:
        """The parts that must be the same in a stream and in a complete reply."""
        usage = {name: value for name, value in self.usage.items() if name[:6] not in ("prompt", "input_")}
        return self.reasoning, self.content, self.calls, self.finish_reason, usage


def script(running: Running, model: str, text: str) -> dict[str, Any]:
    """Fields of a request that make the model answer with exactly this text; markers are control tokens if the model
    has them."""
    tokenizer = next(one for one in running.served if one.name == model).lm.text()
    return {"forced_tokens": [*encoded(text, Markers(tokenizer)), tokenizer.eos_id]}


def chat(running: Running, stream: bool, **body: Any) -> Reply:
    """Ask /v1/chat/completions."""
    reply = Reply()
    if not stream:
        response = HTTP.post(f"{running.url}/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        reply.add(choice["message"])
        reply.finish_reason, reply.usage = choice["finish_reason"], response.json()["usage"]
        return reply
    for chunk in events(running, "/v1/chat/completions", body | {"stream_options": {"include_usage": True}}):
        for choice in chunk["choices"]:
            reply.add(choice["delta"])
            reply.finish_reason = choice["finish_reason"] or reply.finish_reason
        reply.usage = chunk.get("usage") or {}
    return reply


def respond(running: Running, stream: bool, **body: Any) -> Reply:
    """Ask /v1/responses; checks that the pieces of a stream match its last event."""
    if not stream:
        response = HTTP.post(f"{running.url}/v1/responses", json=body)
        assert response.status_code == 200, response.text
        return of_response(response.json())
    texts: dict[tuple[str, str], str] = {}
    kinds: dict[str, list[str]] = {}  # of the events of each item
    for number, one in enumerate(events(running, "/v1/responses", body)):
        assert one["sequence_number"] == number
        if item := one.get("item_id") or one.get("item", {}).get("id"):
            assert item not in [*kinds][:-1]  # the items follow one another
            kinds.setdefault(item, []).append(one["type"].removeprefix("response."))
        if one["type"].endswith(".delta"):
            key = one["item_id"], one["type"].split(".")[1]
            texts[key] = texts.get(key, "") + one["delta"]
    reply = of_response(one["response"])
    output = one["response"]["output"]
    given = {item["id"]: item["content"][0]["text"] if "content" in item else item["arguments"] for item in output}
    assert all(ORDER.fullmatch(" ".join(names)) for names in kinds.values())
    assert [item["id"] for item in output] == [*kinds]
    assert {item: text for (item, _), text in texts.items()} == {item: text for item, text in given.items() if text}
    return reply


def of_response(response: dict[str, Any]) -> Reply:
    """The reply in a complete response."""
    reply = Reply(finish_reason=response["status"], usage=response["usage"])
    for item in response["output"]:
        match item["type"]:
            case "message":
                reply.content += item["content"][0]["text"]
            case "reasoning":
                reply.reasoning += item["content"][0]["text"]
            case "function_call":
                reply.calls.append((item["name"], item["arguments"]))
        reply.kinds.append(f"{item['type']} {item['status']}")
    return reply


def events(running: Running, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The server-sent events of a streamed reply."""
    with HTTP.stream("POST", running.url + path, json=body | {"stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]
