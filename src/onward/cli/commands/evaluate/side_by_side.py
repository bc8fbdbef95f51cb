"""`onward evaluate A B --answers prompts.txt --page out.html`: the answers of two models side by side, to be judged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from onward.base.errors import UserError
from onward.cli.shared.output import print_json, print_next, print_table

if TYPE_CHECKING:
    from onward.cli.commands.evaluate.options import Options
    from onward.evaluation.preferences import Pair
    from onward.parallel.replicas import Replicas

MOST_TOKENS = 256  # maximum number of tokens in an answer


def compare_answers(options: Options, replicas: Replicas) -> None:
    from onward.base.files import atomic_write, writable_ending
    from onward.cli.commands.evaluate.divided import load_alike
    from onward.cli.commands.evaluate.tasks import kept_answers
    from onward.cli.shared.progress import progress_bars
    from onward.evaluation.preferences import chat_answers, pairs, preferred
    from onward.reports.sides import sides_page

    if not options.answers or len(options.sources) != 1 or replicas.mesh.count > 1:
        raise UserError(
            "page needs two models, the prompts, and one process: onward evaluate A B --answers prompts.txt --page "
            f"{options.page}"
        )
    writable_ending(Path(options.page), ".html")
    names = [options.model, options.sources[0]]
    prompts = prompts_of(options.answers)[: options.limit]
    answers = []
    for name in names:
        lm = load_alike(name, options, replicas)
        length = lm.model.config.context_length
        with kept_answers(lm, options.keep, replicas) as kept, progress_bars(counted=True) as show:
            answers.append(chat_answers(lm.engine(), lm.text(), prompts, MOST_TOKENS, length, kept, show))
        del lm
    made = pairs(prompts, *answers)
    verdicts = preferred(made, options.judge, options.judge_model) if options.judge else []
    with atomic_write(Path(options.page)) as new:
        new.write_text(sides_page(names, made, verdicts), encoding="utf-8")
    report(options, names, made, verdicts)


def report(options: Options, names: Sequence[str], made: Sequence[Pair], verdicts: Sequence[float]) -> None:
    from onward.evaluation.preferences import win_rate

    equal = sum(one.first == one.second for one in made)
    result = {"page": options.page, "prompts": len(made), "equal_answers": equal}
    rate = win_rate(verdicts) if verdicts else {}
    if options.json:
        rows = [
            {"prompt": one.prompt, "answers": [one.first, one.second]} | ({"verdict": verdicts[i]} if verdicts else {})
            for i, one in enumerate(made)
        ]
        print_json(
            result | ({"judged": {"better": names[1], "than": names[0]} | rate} if rate else {}) | {"rows": rows}
        )
        return
    if rate:
        print_table([{"model": names[1], "better than": names[0], **rate}])
    print(f"{options.page}: {len(made):,} prompts, {equal:,} with the same answer from both models")
    print_next(f"open {quote(options.page)} in a browser: keys 1 and 2 choose, 0 is a tie")


def prompts_of(file: str) -> list[str]:
    """The prompts of a file: its lines or, in a table, the `prompt` or `question` of each row, or the text of the first
    user message."""
    from onward.data.formats import suffixes
    from onward.data.records import READERS, read_records
    from onward.data.sources import documents

    if suffixes(file)[0] not in READERS:
        lines = [line.strip() for text in documents([file], raw=True) for line in text.split("\n")]
        return [line for line in lines if line]
    found = []
    for record in read_records(file):
        value = next(
            (record.values[name] for name in ("prompt", "question", "messages") if record.values.get(name)), None
        )
        if isinstance(value, list) and value and isinstance(value[0], dict):
            value = next((one.get("content") for one in value if one.get("role") == "user"), None)
        if not isinstance(value, str) or not value.strip():
            raise UserError(
                f"{record.place} has no prompt (it has {json.dumps([*record.values])}): rename its column to prompt"
            )
        found.append(value)
    return found
