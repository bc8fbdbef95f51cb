"""Conversations are encoded to the same tokens as in transformers, and typed text never becomes a control token."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

import onward
from onward import LanguageModel, Tokenizer, UserError, train_tokenizer
from onward.text import Chat, NoTemplate, chat_of

TEXT = "Hello there, what is a cat? It sat on a mat.\n\nYou are kind: answer! é猫 [INST] <|x|> <s> assistant user\n" * 3
CONTROL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"]
LOOP = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
)
TEMPLATES = {
    "ChatML": LOOP + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "Llama 2": """\
{% if messages[0]['role'] == 'system' %}
    {% set rest = messages[1:] %}
    {% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}
{% else %}
    {% set rest = messages %}
    {% set system = '' %}
{% endif %}
{% for m in rest %}
    {% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must take turns') }}{% endif %}
    {%- if m['role'] == 'user' -%}
        {{ bos_token + '[INST] ' + (system if loop.first else '') + m['content'] | trim + ' [/INST]' }}
    {%- else -%}
        {{ ' ' + m['content'] | trim + ' ' + eos_token }}
    {%- endif %}
{% endfor %}""",
    "Llama 3": """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|im_start|>' ~ message['role'] ~ '<|im_end|>\\n\\n' ~ message.content | trim ~ eos_token }}
{%- endfor %}
{%- if tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|im_end|>\\n\\n' }}{%- endif %}""",
    "Gemma": """\
{{ bos_token }}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}
<start_of_turn>{{ role }}
{% generation %}{{ m.content | trim }}{% endgeneration %}<end_of_turn>
{% if loop.index > 6 %}{% break %}{% endif %}
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}""",
    "Mistral": """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '[INST]' ~ (' (last)' if loop.index0 == ns.last else '') ~ m.content ~ '[/INST]' }}
    {%- elif m.role == 'assistant' %}{{ m.content ~ eos_token }}
    {%- else %}{{ m.content }}{% continue %}{% endif %}
{%- endfor %}
{{- strftime_now('%Y') ~ ({'a<b': ['é']} | tojson) }}""",
}


def bytes_() -> tokenizers.Tokenizer:
    inner = train_tokenizer("bpe:330", [TEXT]).inner
    inner.add_special_tokens(CONTROL)
    return inner


def marked(prefix: Any, flags: dict[str, bool]) -> tokenizers.Tokenizer:
    """A tokenizer that marks words and falls back to bytes, like SentencePiece."""
    vocabulary = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *sorted(set(TEXT) - {" "}), "▁", "▁c", "at"]
    ids = {token: i for i, token in enumerate(vocabulary)}
    inner = tokenizers.Tokenizer(models.BPE(ids, [("▁", "c"), ("a", "t")], byte_fallback=True, unk_token="<unk>"))
    if isinstance(prefix, str):
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    else:
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.add_special_tokens([AddedToken(name, normalized=False, **flags) for name in CONTROL])
    return inner


INNER: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "bytes": bytes_,
    "words, everywhere": lambda: marked(None, {}),
    "words, first": lambda: marked("first", {}),
    "control tokens that take spaces along": lambda: marked("never", {"rstrip": True}),
}
TOKENIZERS = {name: make() for name, make in INNER.items()}
SYSTEM = {"role": "system", "content": "You are kind."}
HELLO = {"role": "user", "content": "Hello\nthere, "}
ANSWER = {"role": "assistant", "content": "\n A cat é猫 🐈!", "tool_calls": None}
MESSAGES = [[HELLO], [SYSTEM, HELLO], [HELLO, ANSWER, HELLO], [SYSTEM, HELLO, ANSWER, HELLO, ANSWER, HELLO, ANSWER]]


def tokenizer(inner: str = "bytes", template: str = "ChatML") -> Tokenizer:
    return Tokenizer(TOKENIZERS[inner], "<s>", "</s>", templates={"default": TEMPLATES.get(template, template)})


@pytest.mark.parametrize("inner", TOKENIZERS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_tokens_equal_those_of_transformers(inner: str, template: str) -> None:
    from transformers import PreTrainedTokenizerFast

    ours = Chat(tokenizer(inner, template))
    copy = tokenizers.Tokenizer.from_str(TOKENIZERS[inner].to_str())
    copy.encode_special_tokens = False
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    theirs = PreTrainedTokenizerFast(tokenizer_object=copy, chat_template=TEMPLATES[template], **names)
    for messages in MESSAGES:
        for more in {}, {"tools": [{"type": "function", "name": "é<"}]}:
            for prompt in True, False:
                expected = theirs.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False, **more)
                assert ours.encode(messages, prompt, False, **more) == expected


@pytest.mark.parametrize("template", TEMPLATES)
@given(
    content=st.lists(st.sampled_from([*CONTROL, "<|endoftext|>", "\ufdd0", "\ufdd03\ufdd0", "a", " ", "猫"])).map(
        "".join
    )
)
def test_control_tokens_in_a_message_are_plain_text(template: str, content: str) -> None:
    chat = chat_of(tokenizer("bytes", template))
    special, decode = chat.tokenizer.special, chat.tokenizer.decode
    ids, harmless = (chat.encode([{"role": "user", "content": f"a{text}a"}]) for text in (content, "-"))
    assert [i for i in ids if i in special] == [i for i in harmless if i in special]
    assert decode(ids) == decode(harmless).replace("a-a", f"a{content}a")


@pytest.mark.parametrize("inner", TOKENIZERS)
def test_nor_do_they_come_in_by_roles_or_values_for_the_template(inner: str) -> None:
    chat = Chat(tokenizer(inner, "{{ bos_token }}{{ messages[0].role }}{{ name }}{{ messages[0].x[0].y }}"))
    message = {"role": "</s>", "x": [{"y": "[INST]<s>"}]}
    ids = chat.encode([message], name="<|im_end|>")
    assert [i for i in ids if i in chat.tokenizer.special] == [chat.tokenizer.bos_id]


def test_half_characters_become_unknown_ones() -> None:
    chat = Chat(tokenizer())
    assert chat.encode("a\ud800b") == chat.encode("a\ufffdb")


FAILING: dict[str, tuple[str, Any, str]] = {
    "an exception of the template's own": (TEMPLATES["Llama 2"], [HELLO, HELLO], "roles must take turns"),
    "bad syntax": ("{% for %}", [HELLO], r"\(line 1\)"),
    "a value that is not there": ("{{ messages[9].content.x }}", [HELLO], "has no element 9"),
    "an operation that cannot be": ("{{ 1 / 0 }}", [HELLO], "division by zero"),
    "a way out of the sandbox": ("{{ ''.__class__.__mro__ }}", [HELLO], "unsafe"),
    "a change of what it was given": ("{{ messages.append(1) }}", [HELLO], "unsafe"),
    "a loop without end": ("{% for i in range(10**9) %}{% endfor %}", [HELLO], "Range too big"),
    "no messages": (TEMPLATES["ChatML"], [], "there are no messages"),
    "a message without a role": (TEMPLATES["ChatML"], [{"content": "a"}], "write it as"),
    "a message that is a text": (TEMPLATES["ChatML"], ["a"], "write it as"),
    "an object in a message": (TEMPLATES["ChatML"], [{"role": "user", "content": object()}], "holds object"),
}


@pytest.mark.parametrize("case", FAILING)
def test_one_sentence_for(case: str) -> None:
    template, messages, said = FAILING[case]
    with pytest.raises(UserError, match=said) as caught:
        Chat(tokenizer(template=template)).encode(messages)
    assert "\n" not in str(caught.value)


def test_without_a_template_there_is_a_plain_one_and_a_warning() -> None:
    with pytest.warns(NoTemplate, match="no chat template"):
        chat = Chat(Tokenizer(TOKENIZERS["bytes"], "<s>"))
    ids = chat.encode([SYSTEM, HELLO, ANSWER, HELLO])
    assert ids[0] == chat.tokenizer.bos_id
    said = "System: You are kind.\nUser: Hello\nthere,\nAssistant: A cat é猫 🐈!\nUser: Hello\nthere,\nAssistant:"
    assert chat.tokenizer.decode(ids) == said
    assert chat.stop == ("\nUser:",)


NAMED = {"default": "{{ messages[0].content }}", "rag": "{{ documents }}"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": json.dumps({"chat_template": NAMED["rag"]})}, {"default": NAMED["rag"]}),
        (
            {
                "tokenizer_config.json": json.dumps(
                    {"chat_template": [{"name": n, "template": t} for n, t in NAMED.items()]}
                )
            },
            NAMED,
        ),
        ({"chat_template.jinja": NAMED["default"], "additional_chat_templates/rag.jinja": NAMED["rag"]}, NAMED),
        ({"tokenizer_config.json": '{"chat_template": "old"}', "chat_template.jinja": "new"}, {"default": "new"}),
        ({"tokenizer_config.json": json.dumps({"chat_template": NAMED})}, NAMED),
    ],
)
def test_templates_are_found_and_kept_so_that_transformers_finds_them(
    files: dict[str, str], expected: dict[str, str], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    TOKENIZERS["bytes"].save(str(tmp_path / "tokenizer.json"))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = Tokenizer.load(tmp_path)
    assert found.templates == expected
    found.save(tmp_path / "again")
    assert Tokenizer.load(tmp_path / "again").templates == expected
    theirs = AutoTokenizer.from_pretrained(tmp_path / "again").chat_template
    assert theirs == (expected if len(expected) > 1 else expected.get("default"))


@pytest.mark.parametrize("value", [3, [3], [{"name": "a"}], [{"template": "b"}], {"default": 3}], ids=str)
def test_a_template_that_is_no_text_is_refused_by_its_folder(value: Any, tmp_path: Path) -> None:
    TOKENIZERS["bytes"].save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(UserError, match=f"{tmp_path.name}: chat_template is .*: give a text"):
        Tokenizer.load(tmp_path)


def test_a_template_that_is_not_utf_8_is_one_sentence(tmp_path: Path) -> None:
    TOKENIZERS["bytes"].save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match="is not UTF-8 text"):
        Tokenizer.load(tmp_path)


@pytest.fixture(scope="module")
def lm(tiny_run: Path) -> LanguageModel:
    found = onward.load(tiny_run)
    assert found.tokenizer is not None
    found.tokenizer.templates = {"default": "{% for m in messages %}{{ m.content ~ mood }}\n{% endfor %}"}
    return found


def test_a_model_answers_what_follows_the_templates_text(lm: LanguageModel) -> None:
    messages = [{"role": "user", "content": "The cat"}, {"role": "assistant", "content": "sat."}]
    for how in {"temperature": 0}, {"seed": 2, "stop": "."}, {"seed": 2, "stop_when": lambda text: len(text) > 3}:
        plain = lm.generate("The cat!\nsat.!\n", 9, **how)
        assert lm.chat(messages, 9, variables={"mood": "!"}, **how) == plain
        assert "".join(lm.stream_chat(messages, 9, variables={"mood": "!"}, **how)) == plain
    assert lm.chat("The cat", 5, temperature=0) == lm.generate("The cat\n", 5, temperature=0)


def test_without_a_template_an_answer_ends_before_the_next_user(lm: LanguageModel) -> None:
    bare = LanguageModel(lm.model, Tokenizer(lm.text().inner))
    forced = tuple(lm.text().encode(" s.\nUser:"))
    with pytest.warns(NoTemplate):
        assert bare.chat("a", len(forced), forced_tokens=forced) == " s."
    assert bare.chat("a", len(forced), forced_tokens=forced, stop=".") == " s"


def test_every_published_end_token_ends_an_answer_and_is_kept(lm: LanguageModel, tmp_path: Path) -> None:
    from transformers import AutoConfig

    onward.save(lm, tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9], "pad_token_id": 8}')
    found = onward.load(tmp_path)
    ends = [lm.text().eos_id, 7, 9]
    assert found.text().end_ids == ends
    for end in ends:
        ((answer,),) = found.complete("The", 5, logit_bias={end: 1e4})
        assert (answer.tokens, answer.finish_reason) == ([], "stop")
    onward.save(found, tmp_path / "again")
    again = onward.load(tmp_path / "again").text()
    assert (again.end_ids, again.eos, again.pad) == (ends, lm.text().eos, lm.text().inner.id_to_token(8))
    assert AutoConfig.from_pretrained(tmp_path / "again").eos_token_id == ends
