"""lm-evaluation-harness with Onward's models: its tasks, scored in this process. Needs the extra `eval`.

`onward evaluate MODEL --tasks arc_easy` runs it, and `import onward.harness` makes the model "onward" known to it:
`lm_eval.simple_evaluate("onward", "path=runs/mybook", tasks=["arc_easy"])`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from onward.data.progress import Progress, silent
from onward.errors import UserError
from onward.evaluation.continuations import Pair, score_continuations
from onward.folders import load
from onward.language_model import LanguageModel

READ = frozenset({"top_p", "top_k", "min_p", "repetition_penalty", "temperature"})  # options of generation


@register_model("onward")
class HarnessModel(TemplateLM):
    """A model of Onward, as lm-evaluation-harness calls it. `path`: a folder, a name on the hub, or a loaded model;
    `dtype`, `quantize` and `device` are those of `onward.load`."""

    def __init__(
        self,
        path: str | LanguageModel,
        *,
        dtype: str = "",
        quantize: str = "",
        device: str | None = None,
        batch_size: int | str | None = None,  # batches are chosen by their tokens
        max_batch_size: int | None = None,
        progress: Progress = silent,
    ) -> None:
        super().__init__()
        if isinstance(path, str):
            kind: Any = quantize or None
            path = load(path, getattr(torch, dtype) if dtype else None, device, quantize=kind)
        self.lm, self.progress = path, progress
        self.text = self.lm.text()

    @property
    def max_length(self) -> int:
        """The tokens of the model's context."""
        return self.lm.config.context_length

    @property
    def eot_token_id(self) -> int:
        """The token that ends texts. Raises a UserError if the tokenizer has none."""
        if self.text.eos_id is None:
            raise UserError("the tokenizer has no token that ends texts, which lm-evaluation-harness needs: add one")
        return self.text.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context: that which begins texts, or else the one that ends them."""
        return self.eot_token_id if self.text.bos_id is None else self.text.bos_id

    @property
    def tokenizer_name(self) -> str:
        """A name of the tokenizer, by which lm-evaluation-harness keeps requests in its cache."""
        return f"onward-{self.text.vocab_size}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode a text, by default with the control tokens of the tokenizer unless it begins with one."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.text.piece(self.prefix_token_id))
        return self.text.encode(string, special=add_special_tokens)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = [
            Pair(tuple(context), tuple(rest)) if rest else Pair(tuple(context[:-1]), tuple(context[-1:]))
            for _, context, rest in requests
        ]
        report = lambda done: self.progress("log-likelihoods", done, len(pairs))
        return [(scored.logprob, scored.greedy) for scored in score_continuations(self.lm.model, pairs, report)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text, in windows of the context length."""
        windows = [[*self.windows(*request.args)] for request in requests]
        scored = iter(self._loglikelihood_tokens([(None, *one) for some in windows for one in some]))
        return [sum(next(scored)[0] for _ in some) for some in windows]

    def windows(self, text: str) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the windows of a text, each as context and continuation."""
        tokens = self.tok_encode(text)
        for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1):
            yield make_disjoint_window(window)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the texts that the model writes, up to a stop text. Raises a UserError for an option of generation
        that is not read."""
        results: dict[int, str] = {}
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(i)
        for group in groups.values():
            given = dict(normalize_gen_kwargs(requests[group[0]].args[1], 256))
            given.pop("do_sample", None)
            most = min(given.pop("max_gen_toks"), self.max_length - 1)
            stop = [*(text for text in given.pop("until", []) if text), self.text.piece(self.eot_token_id)]
            if unread := given.keys() - READ:
                raise UserError(f"a task gives {min(unread)}, which generation does not read: remove it from the task")
            prompts = [self.tok_encode(requests[i].args[0])[-(self.max_length - most) :] for i in group]
            options: dict[str, Any] = {"temperature": 0.0, **given}
            for i, [answer] in zip(group, self.lm.complete(prompts, most, stop=tuple(stop), **options)):
                results[i] = answer.text
            self.progress("answers", len(results), len(requests))
        return [results[i] for i in range(len(requests))]


def run_harness(
    lm: LanguageModel, tasks: Sequence[str], *, examples: int, limit: int, progress: Progress = silent
) -> list[dict[str, Any]]:
    """Run tasks of lm-evaluation-harness, by name or as .yaml files; returns a row for each task and metric. `limit` is
    the most questions of a task, `examples` the number of solved ones before each. Raises a UserError for an unknown
    name."""
    manager = TaskManager()
    known = set(manager.all_tasks)
    if unknown := [task for task in tasks if task not in known and not task.endswith((".yaml", ".yml"))]:
        raise UserError(f"{unknown[0]!r:.60} is no task of Onward or of lm-evaluation-harness")
    model = HarnessModel(lm, progress=progress)
    try:
        found = simple_evaluate(
            model,
            tasks=list(tasks),
            num_fewshot=examples or None,
            limit=limit,
            task_manager=manager,
            bootstrap_iters=0,
            log_samples=False,
            verbosity="ERROR",
        )
    except UserError:
        raise
    except Exception as failure:  # the library raises any, such as for a table that is not in the cache of the hub
        reason = " ".join(str(failure).split())[:300] or type(failure).__name__
        raise UserError(f"lm-evaluation-harness cannot run {', '.join(tasks)}: {reason}") from failure
    rows = []
    for task, metrics in (found or {"results": {}})["results"].items():
        for name, value in metrics.items():
            metric, _, _ = name.partition(",")
            if isinstance(value, float) and not metric.endswith("_stderr"):
                error = metrics.get(name.replace(metric, f"{metric}_stderr", 1))
                rows.append({"task": task, "metric": metric, "score": value, "error": error, "examples": examples})
    return rows
