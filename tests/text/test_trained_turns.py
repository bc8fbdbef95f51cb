"""In templates like those of published models, exactly the tokens that a model must write are trained."""

import json
from typing import Any

import jinja2
import pytest
from jinja2.ext import Extension, loopcontrols

from onward import Tokenizer, UserError, train_tokenizer
from onward.text import Chat
from onward.text.chat import Conversation
from onward.text.template import GenerationTag

CONTROL = [
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot|>", "<|head|>", "<|/head|>", "[INST]", "[/INST]"),
    *("[TOOL_CALLS]", "[AVAILABLE]", "<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|message|>"),
    *("<turn>", "</turn>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "<|calls|>", "<|/calls|>"),
    *("<|tool|>", "<|sep|>", "<|think|>"),
]
HERMES_CALLS = (
    "{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}\n{% endif %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
LAST = (  # finds the last user message, as in templates that drop earlier reasoning
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
REASONED = (  # reasoning in a field of the message or in its content
    "{% set text = m.content or '' %}{% set thought = m.reasoning_content or '' %}{% if '</think>' in text %}"
    "{% set thought = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
)
TEMPLATES = {
    "ChatML with tools": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    + HERMES_CALLS
    + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "Qwen3": LAST
    + "{% for m in messages %}"
    + REASONED
    + "{% if m.role == 'assistant' %}<|im_start|>assistant\n{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ text }}"
    + HERMES_CALLS
    + "<|im_end|>\n{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "Qwen3, always thinking": "{% for m in messages %}"
    + REASONED
    + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n{{ thought }}\n</think>\n\n"
    "{% endif %}{{ text }}" + HERMES_CALLS + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    "Llama 3.1": "{{- bos_token }}{% for m in messages %}{{ '<|head|>' + m['role'] + '<|/head|>\n\n' }}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ '{\"name\": \"' + c.function.name + '\", ' }}"
    "{{- '\"parameters\": ' }}{{- c.function.arguments | tojson }}{{- '}' }}{% endfor %}{% else %}"
    "{{- m['content'] | trim }}{% endif %}{{- '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}",
    "Mistral": LAST + "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if loop.index0 == ns.last and tools %}[AVAILABLE]{{ tools | tojson }}{% endif %}[INST] {{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{{ c.function | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}{% elif m.role == 'assistant' %}"
    " {{ m.content | trim }}{{ eos_token }}{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}",
    "Llama 2": "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content | trim + ' ' + eos_token }}"
    "{% else %}{{ bos_token + '[INST] ' + m.content | trim + ' [/INST]' }}{% endif %}{% endfor %}",
    "Gemma": "{{ bos_token }}{% for m in messages %}<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}</turn>\n{% endfor %}{% if add_generation_prompt %}<turn>model\n{% endif %}",
    "harmony": "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.thinking and loop.last %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}{% if m.tool_calls %}"
    "{% set c = m.tool_calls[0].function %}<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json"
    "<|message|>{{ c.arguments | tojson }}<|call|>{% else %}<|start|>assistant<|channel|>final<|message|>"
    "{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}{% else %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    "GLM": "[INST]{% for m in messages %}{% if m.role == 'tool' %}<|observation|>\n{{ m.content }}{% else %}"
    "<|{{ m.role }}|>\n{% if m.role == 'assistant' %}<think></think>\n{% endif %}{{ m.content or '' }}{% endif %}"
    + HERMES_CALLS
    + "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "DeepSeek": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m['content'] }}"
    "{% elif m.role == 'assistant' and m['content'] is none %}<|assistant|><|calls|>{% for c in m.tool_calls %}"
    "{{ c.function.name }}<|sep|>{{ c.function.arguments | tojson }}{% endfor %}<|/calls|></s>{% elif m.role == 'tool' "
    "%}<|tool|>{{ m.content }}{% else %}<|assistant|>{{ m['content'] }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "Phi": "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}" + HERMES_CALLS + "<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "Zephyr": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content or '' }}" + HERMES_CALLS + "{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
}
ASK, MORE = {"role": "user", "content": "Weather in Oslo?"}, {"role": "user", "content": "And now?"}
RAIN = {"role": "assistant", "content": "It rains."}
ARGUMENTS: list[Any] = [{"city": "Oslo"}, {}, {"n": 3}, {"b": True}, {"x": [1, 2]}, {"x": None}, {"x": {"y": ""}}]
RESULT = {"role": "tool", "content": "4 degrees"}


def call(arguments: Any, content: Any = None) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "content": content, "tool_calls": [{"type": "function", "function": function}]}


def chat_of(template: str) -> Chat:
    inner = train_tokenizer("bpe:300", ["the weather in Oslo assistant user <think> </tool_call> " * 3]).inner
    inner.add_special_tokens(CONTROL)
    return Chat(Tokenizer(inner, "<s>", "</s>", templates={"default": TEMPLATES.get(template, template)}))


CHATS = {name: chat_of(name) for name in TEMPLATES}
TALKS = {
    "an answer": [ASK, RAIN],
    "answers": [ASK, RAIN, MORE, {**RAIN, "content": "The sun shines!"}, MORE, RAIN],
    "a system message": [{"role": "system", "content": "Be brief."}, ASK, RAIN],
    **{f"a call with {arguments}": [ASK, call(arguments), RESULT, RAIN] for arguments in ARGUMENTS},
    "calls in two turns": [ASK, call({"n": 1}), RESULT, RAIN, MORE, call({"n": 2}), RESULT, RAIN],
}
WITHOUT_TOOLS = "Llama 2", "Gemma"


def rendered(template: str, messages: list[Any], prompt: bool, **variables: Any) -> str:
    """The text of a template rendered by Jinja."""
    extensions: list[type[Extension]] = [GenerationTag, loopcontrols]
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    plain.filters |= {"tojson": lambda value: json.dumps(value, ensure_ascii=False), "generated": lambda text: text}
    names = {"bos_token": "<s>", "eos_token": "</s>", "tools": None}
    source = TEMPLATES.get(template, template)
    return plain.from_string(source).render(messages=messages, add_generation_prompt=prompt, **names | variables)


def runs(chat: Chat, conversation: Conversation) -> list[tuple[str, str]]:
    """The runs of successive trained tokens: for each, the text before it and its own text."""
    decode = lambda ids: chat.inner.decode(ids, skip_special_tokens=False)
    result, start = [], 0
    tokens, trained = conversation.tokens, [*conversation.trained, False]
    for i, (before, now) in enumerate(zip([False, *trained], trained)):
        if now and not before:
            start = i
        if before and not now:
            result.append((decode(tokens[:start]), decode(tokens[start:i])))
    return result


def written(template: str, messages: list[Any], index: int) -> tuple[str, str]:
    """The text before the answer in message `index`, and the answer with the control token that ends it."""
    before = rendered(template, messages[:index], True)
    text = rendered(template, messages[: index + 1], False)
    if template == "GLM":
        text += "<|observation|>" if messages[index].get("tool_calls") else "<|user|>"
    same = next((i for i, (a, b) in enumerate(zip(before, text)) if a != b), len(before))
    end = max(text.rfind(token) + len(token) for token in CONTROL if token in text)
    return text[:same], text[same:end]


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_each_answer_is_trained_once_after_the_text_that_the_model_is_given(template: str, talk: str) -> None:
    messages, chat = TALKS[talk], CHATS[template]
    if template in WITHOUT_TOOLS and "call" in talk:
        with pytest.raises(UserError, match="message 2 has tool_calls, which the chat template does not write"):
            chat.conversations(messages)
        return
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    expected = [written(template, messages, i) for i in answers]
    found = [run for one in chat.conversations(messages) for run in runs(chat, one)]
    assert sorted(found) == sorted(expected)
    for i, (before, _) in zip(answers, expected):
        if rendered(template, messages[:i], True) == before:
            prompt = chat.encode(messages[:i])
            assert any(one.tokens[: len(prompt)] == prompt for one in chat.conversations(messages[: i + 1]))


THOUGHT = {**RAIN, "reasoning_content": "Clouds."}
THOUGHTS: dict[str, tuple[str, list[Any], list[str]]] = {  # template, messages, expected texts of `runs`
    "each answer with its reasoning": (
        "Qwen3",
        [ASK, THOUGHT, MORE, {"role": "assistant", "content": "<think>Sun.</think>Sun"}],
        ["<think>\nClouds.\n</think>\n\nIt rains.<|im_end|>", "<think>\nSun.\n</think>\n\nSun<|im_end|>"],
    ),
    "reasoning after a beginning that opens it": (
        "Qwen3, always thinking",
        [ASK, {**RAIN, "thinking": "Clouds."}],
        ["Clouds.\n</think>\n\nIt rains.<|im_end|>"],
    ),
    "channels": (
        "harmony",
        [ASK, {**RAIN, "reasoning": "Clouds."}],
        [
            "<|channel|>analysis<|message|>Clouds.<|end|>"
            "<|start|>assistant<|channel|>final<|message|>It rains.<|return|>"
        ],
    ),
}


@pytest.mark.parametrize("case", THOUGHTS)
def test_reasoning_is_trained_under_each_of_its_names(case: str) -> None:
    template, messages, expected = THOUGHTS[case]
    chat = CHATS[template]
    assert [own for one in chat.conversations(messages) for _, own in runs(chat, one)] == expected


BLOCK = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}say:{% generation %}{{ m.content }}!"
    "{% endgeneration %}<|end|>{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>say:{% endif %}"
)


def test_a_generation_block_keeps_its_marks_and_the_end_of_the_turn() -> None:
    chat = chat_of(BLOCK)
    (one,) = chat.conversations([ASK, RAIN, MORE, RAIN])
    assert [own for _, own in runs(chat, one)] == ["It rains.!<|end|>"] * 2


def test_only_chosen_messages_are_trained() -> None:
    chat, talk = CHATS["Gemma"], [ASK, RAIN, MORE, {**RAIN, "content": "Sun"}]
    for given, trained in (2, None), (0, [True, False, True, True]):
        (one,) = chat.conversations(talk, given, trained)
        assert [own for _, own in runs(chat, one)] == ["Sun</turn>"]
    with pytest.raises(UserError, match="it has no answer to train"):
        chat.conversations([ASK, {**RAIN, "content": " "}])


def test_an_answer_that_no_message_precedes_is_trained_after_the_beginning_of_an_answer() -> None:
    for template in "ChatML with tools", "Llama 3.1", "Phi":
        chat = CHATS[template]
        (one,) = chat.conversations([RAIN, ASK, RAIN])
        answer = rendered(template, [RAIN], False).partition("It rains.")[2].strip()
        assert [own for _, own in runs(chat, one)] == [f"It rains.{answer}"] * 2


def test_the_beginning_of_an_answer_is_encoded_as_in_generation() -> None:
    chat = CHATS["ChatML with tools"]
    for content in "\n\nIt rains.", " It", "ant":
        talk = [ASK, {"role": "assistant", "content": content}]
        (one,) = chat.conversations(talk)
        prompt = chat.encode([ASK])
        assert (one.tokens[: len(prompt)], any(one.trained[: len(prompt)])) == (prompt, False)
        assert chat.inner.decode(one.tokens[len(prompt) :]).startswith(content)


IGNORED: dict[str, tuple[str, list[Any], str]] = {
    "thinking": ("ChatML with tools", [ASK, {**RAIN, "thinking": "Clouds."}], "message 2 has reasoning_content, which"),
    "reasoning in the content": (
        "{% for m in messages %}{{ m.content.split('</think>')[-1] }}</s>{% endfor %}",
        [ASK, {**RAIN, "content": "<think>Clouds.</think>Rain"}],
        "message 2 has '<think>Clouds.</think>Rain', of which the chat template writes only 'Rain'",
    ),
    "calls": ("Gemma", [ASK, call({})], "message 2 has tool_calls, which the chat template does not write: .* hermes"),
    "a turn without an end": ("{% for m in messages %}{{ m.content }}\n{% endfor %}", [ASK, RAIN], "never closes"),
}


@pytest.mark.parametrize("case", IGNORED)
def test_what_a_template_does_not_write_cannot_be_trained(case: str) -> None:
    template, messages, message = IGNORED[case]
    with pytest.raises(UserError, match=message):
        chat_of(template).conversations(messages)


KNOWN = "{% for m in messages %}{% if m.role in ['system', 'user'] %}<|user|>{{ m.content }}{% endif %}{% endfor %}"
STRICT = (
    "{% for m in messages %}{% if m.role not in ['system', 'user'] %}{{ raise_exception('no ' + m.role) }}{% endif %}"
    "<|user|>{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("template", [KNOWN, STRICT])
def test_a_developer_s_message_becomes_the_system_s_where_the_template_needs_it(template: str) -> None:
    chat = chat_of(template)
    system = [{"role": "system", "content": "Be brief."}, ASK]
    developer = [{"role": "developer", "content": "Be brief."}, ASK]
    assert chat.encode(developer) == chat.encode(system)
    named = chat_of("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}")
    assert named.encode(developer) != named.encode(system)


@pytest.mark.parametrize("role", ["bogus", "assistant", "tool"])
def test_a_message_without_a_trace_is_refused(role: str) -> None:
    with pytest.raises(UserError, match=f"message 2 has no effect, .* of the role '{role}'"):
        chat_of(KNOWN).encode([ASK, {"role": role, "content": "Hi"}, MORE])
    with pytest.raises(UserError, match=f"no {role}"):
        chat_of(STRICT).encode([ASK, {"role": role, "content": "Hi"}, MORE])


TRIMMED = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}"
WHOLE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"


@pytest.mark.parametrize("content", ["Sure ", "def f():\n    ", "<", "end", "<|end", "<|end|>", " a\n", "|assistant|"])
def test_an_answer_is_continued_right_after_its_text(content: str) -> None:
    parts = [{"type": "text", "text": content[:1]}, {"type": "text", "text": content[1:]}]
    for template, expected in (WHOLE, content), (TRIMMED, content.strip()):
        chat = chat_of(template)
        for given in content, parts:
            ids = chat.encode([ASK, {"role": "assistant", "content": given}], continue_final_message=True)
            before = chat.encode([ASK], False)
            assert ids[: len(before)] == before
            own = chat.inner.token_to_id("<|assistant|>")
            assert ids[len(before) :][0] == own
            assert chat.tokenizer.inner.decode(ids[len(before) + 1 :]) == expected
    with pytest.raises(UserError, match="Cannot continue the last message"):
        chat_of(TRIMMED).encode([ASK, {"role": "assistant", "content": " "}], continue_final_message=True)


@pytest.mark.parametrize("given", ["", None, "null", "{}"])
def test_arguments_of_a_call_are_a_table(given: str | None) -> None:
    chat = CHATS["Llama 3.1"]
    assert chat.encode([ASK, call(given), RESULT]) == chat.encode([ASK, call({}), RESULT])
    assert chat.encode([ASK, call('{"n": [1]}'), RESULT]) == chat.encode([ASK, call({"n": [1]}), RESULT])
