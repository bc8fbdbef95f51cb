"""Chat templates by name, for models without a template. Does not import torch."""

from dataclasses import dataclass
from pathlib import Path

from onward.base.errors import UserError
from onward.base.suggestions import nearest
from onward.text.chat import chat_of
from onward.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Template:
    """Jinja source, the control tokens that it needs and the one that ends an answer; `{{ bos_token }}` and `{{
    eos_token }}` are the tokenizer's own."""

    source: str
    controls: tuple[str, ...] = ()
    end: str = ""  # control token that ends an answer; default: eos_token


ALTERNATE = (  # a system message becomes the beginning of the first message of the user
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim + '\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
)

TEMPLATES = {
    "chatml": Template(
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        ("<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
    ),
    "hermes": Template(  # ChatML with tools
        "{% set first = messages[0].content | trim if messages[0].role == 'system' else '' %}"
        "{% if first or tools %}<|im_start|>system\n{{ first }}"
        "{% if tools %}{{ '\n\n' if first else '' }}You can call these tools:\n<tools>\n"
        "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>\n"
        'Write each call as <tool_call>\n{"name": name, "arguments": arguments}\n</tool_call>{% endif %}<|im_end|>\n'
        "{% endif %}{% for message in messages %}{% if not (loop.first and message.role == 'system') %}"
        "<|im_start|>{{ message.role }}\n{{ message.content | default('') | trim }}"
        "{% for call in message.tool_calls or [] %}{{ '\n' if message.content or not loop.first else '' }}"
        '<tool_call>\n{"name": {{ (call.function or call).name | tojson }}, '
        '"arguments": {{ (call.function or call).arguments | tojson }}}\n</tool_call>{% endfor %}'
        "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        ("<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
    ),
    "llama3": Template(
        "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
        "{{ message.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
    ),
    "mistral": Template(
        "{{ bos_token }}" + ALTERNATE + "{% for message in messages %}{% if message.role == 'assistant' %}"
        " {{ message.content | trim }}{{ eos_token }}{% else %}"
        "[INST] {% if loop.first %}{{ system }}{% endif %}{{ message.content | trim }} [/INST]{% endif %}{% endfor %}",
    ),
    "gemma": Template(
        "{{ bos_token }}" + ALTERNATE + "{% for message in messages %}"
        "<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
        "{% if loop.first %}{{ system }}{% endif %}{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        ("<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
    ),
    "plain": Template(
        "{{ bos_token }}{% for message in messages %}{{ message.role | capitalize }}: {{ message.content | trim }}"
        "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}",
    ),
}


def with_template(tokenizer: Tokenizer, name: str) -> Tokenizer:
    """Return a copy of the tokenizer with another chat template: `name` is a built-in one, a key of TEMPLATES such as
    chatml, or the path of a Jinja file.

    Control tokens that the vocabulary lacks are added to it, and the one that ends an answer becomes an end token.
    Raises a UserError if the template cannot be used.
    """
    template = TEMPLATES.get(name)
    if template is None:
        path = Path(name)
        if not path.is_file():
            raise UserError(f"template is {name!r}: {nearest(name, TEMPLATES)} (or name a file of Jinja)")
        template = Template(path.read_text(encoding="utf-8"))
    if not template.end and tokenizer.eos is None and "eos_token" in template.source:
        raise UserError(
            f"Cannot use the template {name!r}, because it writes eos_token, which this tokenizer lacks: name another"
        )
    inner = type(tokenizer.inner).from_str(tokenizer.inner.to_str())
    inner.add_special_tokens([token for token in template.controls if inner.token_to_id(token) is None])
    own = inner.token_to_id(template.end) if template.end else None
    ends = ([] if own is None else [own]) + tokenizer.end_ids
    named = {"bos": tokenizer.bos, "eos": tokenizer.eos, "pad": tokenizer.pad}
    result = Tokenizer(inner, **named, ends=ends, templates=tokenizer.templates | {"default": template.source})
    chat_of(result)  # raises a UserError for invalid Jinja
    return result
