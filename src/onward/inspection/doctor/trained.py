"""Checks of a trained model and of its tokenizer."""

from __future__ import annotations

import torch
from torch import nn

from onward.base.errors import UserError
from onward.inspection.doctor.finding import Check, Outcome, cross_entropy, verdict
from onward.inspection.doctor.subject import Subject
from onward.text.chat import chat_of
from onward.text.tokenizer import Tokenizer

OFFSETS = -1, 0, 1, 2
NEW, PHRASE = 24, 4  # number of generated tokens, and of tokens in a phrase
CONFIDENT = 0.5  # a model whose likeliest tokens have a greater mean probability is not merely guessing
COPIED = 0.5  # a copier's loss for the input token is below this share of its loss for the next token
NOT_TRAINED = "the model is not declared as trained"


def offset(s: Subject) -> Outcome:
    """Check that a trained model predicts the next token better than tokens at other offsets."""
    if not s.trained or not s.batches:
        return "not applicable", NOT_TRAINED if not s.trained else "no text is given: add --text or batches"
    tokens = torch.cat([batch[:1, : s.context_length or None] for batch, _ in s.batches[:1]])
    logits = s(tokens)
    values = {k: float(cross_entropy(logits, tokens, k)) for k in OFFSETS}
    best = min(OFFSETS, key=lambda k: values[k])
    what = "the losses by offset of the target are " + ", ".join(f"{k:+d}: {v:.2f}" for k, v in values.items())
    if best == 0 and values[0] > COPIED * values[1]:  # as with a tied head in the first steps
        return "noted", f"{what}: the model has learned too little for a verdict"
    return verdict(best == 1, what, f"offset {best:+d} is predicted best")


def repetition(s: Subject) -> Outcome:
    """Check that greedy answers do not merely repeat the last token of the prompt."""
    if not s.trained:
        return "not applicable", NOT_TRAINED
    prompts = s.batches[0][0][:2] if s.batches else s.tokens
    most = s.context_length or NEW + prompts.size(1)
    prompts = prompts[:, : max(1, min(prompts.size(1), 16, most // 2))]
    rows, count = prompts, min(NEW, most - prompts.size(1))
    if count < PHRASE:
        return "not applicable", f"a context of {most} tokens has no room for {PHRASE} tokens after a prompt"
    sure = 0.0
    for _ in range(count):
        probability, likeliest = s(rows)[:, -1:].softmax(-1).max(-1)
        rows, sure = torch.cat([rows, likeliest], 1), sure + float(probability.mean()) / count
    new = rows[:, prompts.size(1) :]
    copies = float((new == prompts[:, -1:]).float().mean())
    phrases = [tuple(row[i : i + PHRASE]) for row in new.tolist() for i in range(count - PHRASE + 1)]
    repeated = 1 - len({*phrases}) / max(1, len(phrases))
    what = f"{repeated:.0%} of the {PHRASE}-token phrases in {count} greedy tokens of {len(new)} texts are repeated"
    if (
        copies == 1 and count > 1 and sure > CONFIDENT
    ):  # a fresh model with a tied head also repeats, but with low confidence
        return "failed", f"{what}: each text only repeats its last token", "the targets of training"
    return "noted", what


def tokenizer(s: Subject) -> Outcome:
    """Check that the embedding and the logits have a row for each id of the tokenizer."""
    if s.tokenizer is None:
        return "not applicable", "no tokenizer is given"
    size = int(getattr(s.tokenizer, "vocab_size", None) or len(s.tokenizer))
    tables = [m.num_embeddings for m in s.model.modules() if isinstance(m, nn.Embedding)]
    rows = min([s.vocab_size, *(count for count in tables if count > s.vocab_size // 2)])  # without position tables
    unused = f" ({rows - size:,} unused)" if rows > size else ""
    what = f"the tokenizer has {size:,} ids, and the model {rows:,}{unused}"
    return verdict(size <= rows, what, f"token ids {rows:,} to {size - 1:,} have no row")


def chat_template(s: Subject) -> Outcome:
    """Check that a conversation formatted for training begins with the generation prompt, and that its answers end with
    an end token."""
    if not isinstance(s.tokenizer, Tokenizer) or not s.tokenizer.templates:
        return "not applicable", "no tokenizer with a chat template is given"
    question, answer = {"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Good day."}
    try:
        chat = chat_of(s.tokenizer)
        (trained,) = chat.conversations([question, answer])
        prompt = chat.encode([question])
    except UserError as error:
        return "failed", str(error), "the chat template"
    tokens, mask = trained.tokens, trained.trained
    first = mask.index(True) if True in mask else len(mask)
    last = max((i for i, trained in enumerate(mask) if trained), default=-1)
    before = tokens[:first]
    same = next((i for i, (a, b) in enumerate(zip(prompt, before)) if a != b), min(len(prompt), len(before)))
    what = f"{same} of the {len(before)} tokens before a trained answer match the generation prompt"
    if same < len(before):
        return "failed", what, f"token {same}: {s.tokenizer.decode(before[same:])!r} in training"
    if len(prompt) > len(before):
        more = s.tokenizer.decode(prompt[same:])
        return "noted", f"{what}, which continues with {more!r}"
    ended = tokens[last] in s.tokenizer.end_ids
    end = s.tokenizer.decode(tokens[last : last + 1]) or s.tokenizer.inner.id_to_token(tokens[last])
    return verdict(ended, f"{what}; an answer ends with {end!r}", "this token does not end generation")


TRAINED = {
    "offset": Check(
        "a trained model and text",
        "compares the losses for the tokens before, at, one after and two after each position: the next must be lowest,"
        " except that the loss at the position may be lower by less than half, as in the first steps of training with a"
        " tied head",
        "the model has learned to copy, or to skip a token: its training loss is meaningless",
        "train on tokens[:, :-1] and tokens[:, 1:], and shift only once: in the data or in the loss",
        offset,
    ),
    "repetition": Check(
        "a trained model",
        f"generates {NEW} greedy tokens after two prompts: notes repeated phrases, fails if only one token repeats",
        "a model that only repeats its last token has learned to copy its input",
        "shift the targets by one; small models often repeat phrases: sample, or train longer",
        repetition,
    ),
    "tokenizer": Check(
        "a tokenizer",
        "compares the ids of the tokenizer with the rows of the embedding and the logits",
        "some texts raise an error, or are read as other tokens",
        "enlarge the embedding and the head to the tokenizer's size, or load the model's tokenizer",
        tokenizer,
    ),
    "chat template": Check(
        "a tokenizer with a chat template",
        "compares a training conversation with the generation prompt: both must agree up to the answer, which must end "
        "with an end token",
        "the model generates from a prompt that it was not trained on, or never stops",
        "make add_generation_prompt write the tokens that precede a trained answer, and end answers with an end token",
        chat_template,
    ),
}
