"""CORE, the 22 tasks by which DataComp-LM compares base models (Li et al. 2024), from the bundle that nanochat reads.

FOLDER/
  core.yaml             icl_tasks, each with label, icl_task_type, dataset_uri, num_fewshot, continuation_delimiter
  eval_meta_data.csv    Eval Task, Random baseline: the score of guessing, in percent
  eval_data/            the items of each task, as .jsonl
"""

from __future__ import annotations

import csv
import io
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from onward.base import fields
from onward.base.arguments import Range
from onward.base.errors import UserError
from onward.base.suggestions import nearest
from onward.config.ranges import SizeOrZero
from onward.evaluation.continuations import Pair, Scored, score_continuations
from onward.evaluation.kept import Kept
from onward.evaluation.score import batched
from onward.evaluation.tasks.files import json_lines
from onward.evaluation.tasks.task import ScoredTask, Task, text_of

if TYPE_CHECKING:
    from onward.model.decoder import Decoder
    from onward.text.tokenizer import Tokenizer

Kind = Literal["multiple_choice", "schema", "language_modeling"]
FIELDS: dict[Kind, dict[str, type]] = {  # fields of an item, by kind
    "multiple_choice": {"query": str, "choices": list, "gold": int},
    "schema": {"context_options": list, "continuation": str, "gold": int},
    "language_modeling": {"context": str, "continuation": str},
}
TOGETHER = 64  # number of items per replica that are in memory as tokens, with their examples
ORDER, SHOTS = 1337, 1234  # nanochat's seeds for the order of the items and for the examples of item 0


@dataclass(frozen=True)
class CoreEntry:
    """A task of CORE in core.yaml."""

    label: str
    icl_task_type: Kind
    dataset_uri: str  # path of the data in eval_data/
    num_fewshot: tuple[SizeOrZero, ...]  # number of examples before each item; only the first value is used
    continuation_delimiter: str = " "  # text between a question and its answer
    baseline: Annotated[float, Range(0, 99.999)] = 0.0  # score of guessing, in percent


@dataclass(frozen=True)
class Core(ScoredTask, kind="core"):
    """The tasks of the CORE benchmark (Li et al. 2024), with the order of items, the examples and the prompts of
    nanochat, so that scores can be compared.

    In a multiple-choice task, the model's answer is the choice with the highest mean log-probability of its tokens; in
    a schema task, it is the context that makes the continuation likeliest; in a language-modeling task, a continuation
    is right if every token is the model's likeliest token.
    """

    folder: str  # folder of the bundle
    task: str = ""  # label of one task; default: all tasks

    @property
    def label(self) -> str:
        return self.task or self.kind

    @property
    def chance(self) -> float:
        return 0.01 * self.entry.baseline

    @property
    def shots(self) -> int:
        return self.entry.num_fewshot[0]

    @property
    def entry(self) -> CoreEntry:
        known = entries(self.folder)
        if self.task not in known:
            raise UserError(f"{self.task!r} is not a task of {self.folder}: {nearest(self.task, known)}")
        return known[self.task]

    def parts(self) -> Sequence[Task]:
        return [self] if self.task else [replace(self, task=label) for label in entries(self.folder)]

    def items(self, count: int) -> list[dict[str, Any]]:
        """The first `count` items, in nanochat's shuffled order."""
        items = read_items(Path(self.folder) / "eval_data" / self.entry.dataset_uri, self.entry)
        random.Random(ORDER).shuffle(items)
        return items[:count]

    def texts(self, count: int, examples: int = 0) -> list[str]:
        return [solved(item, self.entry) for item in self.items(count)]

    def score(
        self, model: Decoder, tokenizer: Tokenizer, count: int, kept: Kept, report: Callable[[int, int], None]
    ) -> list[bool]:
        items = self.items(count)
        if self.shots >= len(items):
            raise UserError(
                f"{self.task} needs {self.shots} examples, but has only {len(items)} items: use a higher limit"
            )
        right: list[bool] = []
        for group in batched(range(len(items)), TOGETHER * kept.replicas.count):
            pairs = {i: self.pairs(items, i, tokenizer, model.config.context_length) for i in group}
            flat = [pair for own in pairs.values() for pair in own]
            scored = iter(score_continuations(model, flat, kept=kept))
            right += [self.right(items[i], pairs[i], [next(scored) for _ in pairs[i]]) for i in group]
            report(len(right), len(items))
        return right

    def pairs(self, items: Sequence[Mapping[str, Any]], i: int, tokenizer: Tokenizer, length: int) -> list[Pair]:
        """The pairs of item i, one for each choice, after examples drawn from the other items. Texts longer than
        `length` tokens lose their first tokens."""
        chosen = random.Random(SHOTS + i).sample(range(len(items) - 1), self.shots)
        examples = [items[j + (j >= i)] for j in chosen]  # skips item i
        kind, delimiter, item = self.entry.icl_task_type, self.entry.continuation_delimiter, items[i]
        before = "".join(solved(example, self.entry) + "\n\n" for example in examples)
        texts = [before + text for text in texts_of(item, kind, delimiter)]
        if kind == "language_modeling":
            texts.append((before + item["context"].strip() + delimiter).strip())
        first = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
        tokens = [[*([] if first is None else [first]), *tokenizer.encode(text, special=False)] for text in texts]
        if kind == "schema":
            same = common([one[::-1] for one in tokens])
            starts = [len(one) - same for one in tokens]
        else:
            starts = [common(tokens)] * len(tokens)
        if kind == "language_modeling":
            tokens.pop()
        result = []
        for one, start in zip(tokens, starts):
            start = min(start, len(one) - 1)  # one choice may be a prefix of another
            cut = max(0, len(one) - length)
            if start <= cut:
                raise UserError(
                    f"a continuation of {self.task} has {len(one) - start} tokens, more than the context of {length}: "
                    "evaluate a model with a longer context"
                )
            result.append(Pair(tuple(one[cut:start]), tuple(one[start:])))
        return result

    def right(self, item: Mapping[str, Any], pairs: Sequence[Pair], scored: Sequence[Scored]) -> bool:
        if self.entry.icl_task_type == "language_modeling":
            return scored[0].greedy
        means = [one.logprob / len(pair.continuation) for one, pair in zip(scored, pairs)]
        return means.index(max(means)) == item["gold"]


def texts_of(item: Mapping[str, Any], kind: Kind, delimiter: str) -> list[str]:
    """An item as texts, one for each choice."""
    match kind:
        case "multiple_choice":
            return [f"{item['query']}{delimiter}{choice}" for choice in item["choices"]]
        case "schema":
            return [f"{context}{delimiter}{item['continuation']}" for context in item["context_options"]]
        case "language_modeling":
            return [f"{item['context'].strip()}{delimiter}{item['continuation']}"]


def solved(item: Mapping[str, Any], entry: CoreEntry) -> str:
    """An item with its right answer."""
    texts = texts_of(item, entry.icl_task_type, entry.continuation_delimiter)
    return texts[item["gold"]] if "gold" in FIELDS[entry.icl_task_type] else texts[0]


def common(sequences: Sequence[Sequence[int]]) -> int:
    """Length of the common prefix."""
    columns = enumerate(zip(*sequences))
    return next((i for i, column in columns if len({*column}) > 1), min(map(len, sequences)))


def core_metric(scores: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """The CORE metric and its standard error: the mean over tasks of centered scores, (score - chance) / (1 - chance),
    which is 0 for random guessing and 1 if all answers are right. The tasks' errors are treated as independent."""
    centered = [(score - chance) / (1 - chance) for score, _, chance in scores]
    errors = [error / (1 - chance) for _, error, chance in scores]
    return math.fsum(centered) / len(scores), math.hypot(*errors) / len(scores)


@lru_cache(maxsize=8)
def entries(folder: str) -> dict[str, CoreEntry]:
    import yaml  # imported here, because only this task needs it

    path = Path(folder) / "core.yaml"
    try:
        table = yaml.safe_load(text_of(str(path), Core.kind))
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    given = table.get("icl_tasks") if isinstance(table, Mapping) else None
    if not isinstance(given, list) or not given or not all(isinstance(one, Mapping) for one in given):
        raise UserError(f"{path} has no list icl_tasks: name the folder of a bundle of CORE")
    meta = Path(folder) / "eval_meta_data.csv"
    rows = csv.DictReader(io.StringIO(text_of(str(meta), Core.kind)))
    baselines = {row.get("Eval Task"): row.get("Random baseline") for row in rows}
    result = {}
    for i, one in enumerate(given):
        known = {name: one[name] for name in fields.hints(CoreEntry) if name in one}
        entry = fields.build(CoreEntry, known | {"baseline": baselines.get(one.get("label"))}, f"{path}.icl_tasks[{i}]")
        if not entry.num_fewshot:
            raise UserError(f"{path}.icl_tasks[{i}].num_fewshot is empty: give it a number")
        result[entry.label] = entry
    return result


def read_items(path: Path, entry: CoreEntry) -> list[dict[str, Any]]:
    items, needed = [], FIELDS[entry.icl_task_type]
    for where, item in json_lines(str(path), text_of(str(path), Core.kind)):
        given = item if isinstance(item, dict) else {}
        wrong = [name for name, kind in needed.items() if type(given.get(name)) is not kind]
        if wrong:
            raise UserError(
                f"{where} has no {wrong[0]} ({needed[wrong[0]].__name__}), which {entry.label} needs: add it"
            )
        for options in (item[name] for name, kind in needed.items() if kind is list):
            if not all(isinstance(one, str) for one in options) or not 0 <= item["gold"] < len(options):
                raise UserError(f"{where}: gold is {item['gold']}: give the index of one of its texts, from 0")
        items.append(item)
    return items
