"""/tokenize, /detokenize and /tokenizer_info, in the formats of vLLM, llama.cpp and lm-eval."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field

from onward.serving.chat import ENDS, ChatMessage, encoded, message_of, variables_of
from onward.serving.errors import ApiError
from onward.serving.fields import Body, check_others
from onward.serving.prompt_size import check_size
from onward.serving.request_objects import Tool
from onward.serving.service import service_of
from onward.serving.shapes import Tokens
from onward.serving.tools import Tools
from onward.serving.usage import spelled
from onward.text.chat import chat_of

router = APIRouter(tags=["tokens"])
SPECIAL = "add_special_tokens", "add_special"  # fields for a prompt
OF_MESSAGES = *ENDS, "tools", "chat_template_kwargs"  # fields for messages


class TokenizeRequest(Body):
    """The body of a request of /tokenize: one of prompt, content and messages."""

    prompt: str | None = None
    content: str | None = Field(None, description="The prompt, as llama.cpp calls it.")
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = Field(None, description="By default true for prompt; also add_special.")
    add_special: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the chat template.")
    with_pieces: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """The body of a request of /detokenize: token ids."""

    tokens: Tokens


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, http: Request) -> dict[str, Any]:
    """Return as JSON the token ids of a text or of a conversation, their number and the context length. Raises an
    ApiError unless exactly one of text and conversation is given."""
    service = service_of(http)
    served = service.model(body.model)
    check_others(body)
    tokenizer = served.lm.text()
    text = body.prompt if body.prompt is not None else body.content
    if (text is None) == (body.messages is None):
        raise ApiError(
            "Cannot tokenize both a prompt and messages, or neither: give one of prompt (or content) and messages",
            param="prompt",
        )
    if body.prompt is not None and body.content not in (None, body.prompt):
        raise ApiError("prompt and content are both given and differ: leave one out", param="content")
    for name in OF_MESSAGES if text is not None else SPECIAL:
        if getattr(body, name):
            kind = "a prompt" if text is not None else "messages"
            raise ApiError(f"{name} is not a field for {kind}: leave it out", param=name)
    if text is not None:
        given = {value for name in SPECIAL if (value := getattr(body, name)) is not None} or {body.content is None}
        if len(given) > 1:
            raise ApiError(
                "add_special_tokens and add_special are both given and differ: leave one out", param=SPECIAL[1]
            )
        (special,) = given  # its default is that of vLLM for prompt, and of llama.cpp for content
        check_size(len(text), served, "prompt" if body.content is None else "content")
        tokens = await service.compute(lambda: tokenizer.encode(text, special=special), size=len(text))
    else:
        messages = [message_of(one.model_dump(), number) for number, one in enumerate(body.messages or [])]
        chat = await service.compute(chat_of, tokenizer)
        ends = {name: value for name in ENDS if (value := getattr(body, name)) is not None}
        variables = variables_of(body.chat_template_kwargs, Tools.of(body.tools, None, None), served)
        tokens = await encoded(service, chat, messages, "messages", served, None, ends, variables)
    result: dict[str, Any] = {"count": len(tokens), "max_model_len": served.engine.length, "tokens": tokens}
    if text is None:
        result["stop"] = list(chat.stop)  # texts that end the answer
    if body.with_pieces:
        pieces = await service.compute(lambda: {token: tokenizer.piece(token) for token in set(tokens)})
        result["tokens"] = [{"id": token, "piece": pieces[token]} for token in tokens]
    if body.return_token_strs:
        texts = await service.compute(lambda: {token: spelled(tokenizer, token) for token in set(tokens)})
        result["token_strs"] = [texts[token] for token in tokens]
    return result


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, http: Request) -> dict[str, str]:
    """Return as JSON the text of token ids. Raises an ApiError for an id outside the vocabulary."""
    service = service_of(http)
    served = service.model(body.model)
    check_others(body)
    if unknown := [token for token in body.tokens if not 0 <= token < served.lm.config.vocab_size]:
        raise ApiError(
            f"Token {unknown[0]} does not exist: the vocabulary has ids 0 to {served.lm.config.vocab_size - 1}",
            param="tokens",
        )
    text = await service.compute(served.lm.text().decode, body.tokens, size=len(body.tokens))
    return {"prompt": text, "content": text}


@router.get("/tokenizer_info")
async def tokenizer_info(http: Request, model: str | None = None) -> dict[str, Any]:
    """Return as JSON the control tokens of a tokenizer by name, and its chat template (null without one). `model` is
    the name of the model, by default that of the first."""
    tokenizer = service_of(http).model(model).lm.text()
    templates = tokenizer.templates
    template = templates.get("default") or next(iter(templates.values()), None)
    return {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.names, "chat_template": template}
