"""onward evaluate: the loss, perplexity and bits per byte of a model on a text; the accuracy of a classifier or reward
model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from onward.base.errors import UserError
from onward.base.suggestions import nearest
from onward.cli.commands.evaluate.options import ASKED, OF_EXAMPLES, OF_TEXT, Options
from onward.cli.shared.options import parse
from onward.cli.shared.output import console, print_json, print_next, print_table
from onward.cli.shared.training import in_processes
from onward.cli.shared.warnings import warn_of_unknown

if TYPE_CHECKING:
    from onward.api.language_model import LanguageModel
    from onward.config.decoder import DecoderConfig
    from onward.config.mesh import Mesh
    from onward.evaluation.tasks import Task
    from onward.parallel.replicas import Replicas
    from onward.planning.memory import GenerationMemory
    from onward.training.inputs.texts import Inputs

ABOUT = """\
Measure loss, perplexity and bits per byte of a model on a text. For a classifier, measure the accuracy and the
confusion matrix. For a reward model, measure how often it prefers the chosen answer, and the mean margin.

examples:
  onward evaluate runs/mybook                    the validation text of the run, and tasks that need no other text
  onward evaluate runs/mybook other.txt
  onward evaluate runs/mybook other.txt --stride 64 --json
  onward evaluate runs/mybook runs/lora chats.jsonl         loss on the answers of examples, with standard errors
  onward evaluate runs/mybook runs/lora --answers prompts.txt --page sides.html     answers to judge, side by side
  onward evaluate runs/kinds kinds.jsonl         a classifier, on rows of --method classify
  onward evaluate runs/judge pairs.jsonl         a reward model, on rows of --method reward
  onward evaluate runs/mybook other.txt --quantize int4     the loss with plain and with int4 weights
  onward evaluate runs/mybook --tasks cloze:other.txt,mapping,copying     questions, with standard errors
  onward evaluate runs/mybook --tasks cloze,words,core:eval_bundle        cloze and words on the run's validation text
  onward evaluate runs/mybook --tasks "arithmetic(digits=2), choices:questions.jsonl" --examples 5
  onward evaluate runs/mybook runs/other --tasks cloze:other.txt          is one better by more than noise?
  onward evaluate runs/mybook --tasks choices:exam.jsonl --against runs/mybook        were the questions trained on?
  torchrun --standalone --nproc-per-node 2 -m onward evaluate runs/mybook other.txt   windows or questions, divided
  torchrun --standalone --nproc-per-node 4 -m onward evaluate runs/mybook other.txt --mesh "replicate=2 tensor=2"

tasks:
  cloze:FILE           choose the real one of four continuations of a passage; without :FILE, passages come from the
                       run's validation text
  words:FILE           the plurals of words of a text, after three examples; words(ending="ed") for another ending
  copying, brackets    a sequence that repeats; the bracket that closes the innermost open one
  arithmetic           sums and differences; arithmetic(digits=2)
  mapping              word pairs defined only in the prompt, with 0, 1, 2, 4 and 8 examples
  choices:FILE         your own questions: question, choices and answer, as .jsonl, .json or .csv
  arc_easy, FILE.yaml  any task of lm-evaluation-harness (pip install 'onward[eval]')
  core:FOLDER          the 22 tasks of CORE and their centered mean, from the bundle that nanochat reads
  answers:FILE         questions that the model answers in text; answers(file="FILE", match="number")
"""


def main(argv: Sequence[str]) -> int:
    return in_processes(lambda: evaluate(argv), "give the same command again")


def evaluate(argv: Sequence[str]) -> int:
    """Processes share the work, and the first one prints the figures."""
    options = parse(Options, argv, prog="onward evaluate", about=ABOUT)
    replicas = arranged(options)
    console.quiet = bool(replicas.rank)
    if options.page:
        from onward.cli.commands.evaluate.side_by_side import compare_answers

        compare_answers(options, replicas)
    elif options.tasks or options.choices or options.answers:
        of_tasks(options, replicas)
    else:
        of_data(options, replicas)
    return 0


def arranged(options: Options) -> "Replicas":
    """Arrange the processes as replicas of the model, in the mesh of the options or, by default, the mesh that `chosen`
    returns. Raises a UserError for a mesh that divides the model into shards or stages, or divides the windows."""
    from onward.base.device import choose_device
    from onward.config.mesh import Mesh
    from onward.parallel.replicas import Replicas
    from onward.training.run.together import joined

    if (processes := joined()) is None:
        if not options.mesh:
            return Replicas()
        from onward.parallel.processes import Processes

        processes = Processes.join()
    if options.mesh:
        axes = Mesh.parse(options.mesh)
        if axes.pipeline * axes.shards > 1:
            raise UserError(
                f"mesh is {str(axes)!r}, but evaluation divides a model only by a tensor axis: give replicate and "
                "tensor"
            )
    else:
        axes, words = processes.replicas.first("the mesh", lambda: chosen(options, processes.count))
        if words and not processes.rank:
            console.print(words, markup=False, soft_wrap=True)
    return processes.arranged(axes).connected(choose_device(options.device)).replicas


def chosen(options: Options, count: int) -> tuple["Mesh", str]:
    """Return the default mesh, and a message if it divides the model. The mesh has only replicas if a device can hold
    the whole model and a batch, or if an option or the model does not support division; otherwise it has the smallest
    tensor axis with which a process's part fits or, if no part fits, the largest."""
    from onward.cli.commands.evaluate.divided import outline_of
    from onward.config.mesh import Mesh
    from onward.planning.choice import first_that_fits, holes_on, in_words
    from onward.planning.evaluation import evaluation_meshes, memory_of_questions, memory_of_text

    # no shards: processes with different numbers of questions would wait for each other
    replicas = Mesh(replicate=count), ""
    if options.quantize:  # quantized weights cannot be divided
        return replicas
    asks, names = options.tasks or options.choices or options.answers, [options.model]
    if asks:
        names, works = [*names, *options.sources], [memory_of_questions]
    else:
        works = [memory_of_text] if options.sources else [memory_of_text, memory_of_questions]
    try:
        models = [outline_of(name, options) for name in names]
    except UserError:  # the model cannot be divided, or it cannot be loaded, which `load` reports later
        return replicas
    holes = holes_on(options.device)

    def needed(mesh: Mesh) -> tuple["GenerationMemory", "DecoderConfig"]:
        """Return the largest peak memory of a process in the mesh, and the configuration of the model that needs it."""
        each = ((work(config, mesh, dtype, holes), config) for config, dtype in models for work in works)
        return max(each, key=lambda one: one[0].peak)

    meshes = evaluation_meshes([config for config, _ in models], count)
    mesh = first_that_fits(meshes, lambda mesh: needed(mesh)[0].peak, options.device)
    return mesh, in_words(mesh, *needed(mesh), options.device) if mesh.divides else ""


def of_data(options: Options, replicas: "Replicas") -> None:
    from onward.cli.commands.evaluate.chats import are_examples, are_models, evaluate_chats
    from onward.cli.commands.evaluate.divided import load_alike
    from onward.cli.commands.evaluate.tasks import keep, own_tasks, row, step_of
    from onward.evaluation.heads import judges
    from onward.reports.runs.scores import scores_of

    models = [options.model, *are_models(options.sources)]
    options = replace(options, sources=tuple(name for name in options.sources if name not in models))
    lm = load_alike(options.model, options, replicas)
    if not judges(lm.model) and are_examples(options.sources, options.field, options.columns, options.ignore):
        check_not_given(options, OF_TEXT, "the rows are examples with answers")
        evaluate_chats([lm, *models[1:]], models, options, replicas)
        return
    if options.template:
        raise UserError("template applies only to examples, such as a .jsonl file of messages: leave it out")
    if len(models) > 1:
        of_texts([lm, *models[1:]], models, options, replicas)
        return
    measure = of_examples(options, lm, replicas) if judges(lm.model) else of_text(options, lm, replicas)
    result = asdict(measure(lm))
    plain = {}
    if options.quantize:
        plain = asdict(measure(load_alike(options.model, replace(options, quantize=""), replicas)))
    inputs = None if options.sources or judges(lm.model) else inputs_of(options)
    results = own_tasks(lm, inputs.validation_text(lm.text()), replicas) if inputs else []
    if replicas.rank:
        return
    keep(options.model, options, scores_of([], results, step_of(options.model)))
    tasks = [*map(row, results)]
    if options.json:
        print_json(result | ({"plain": plain} if plain else {}) | ({"tasks": tasks} if tasks else {}))
        return
    confusion = result.pop("confusion", {})
    plain.pop("confusion", None)
    print_table([{"weights": "plain"} | plain, {"weights": options.quantize} | result] if plain else [result])
    if confusion:
        print("\nexamples of each label (rows), by the likeliest class (columns)")
        print_table([{"(label)": label} | row for label, row in confusion.items()])
    if tasks:
        print("\ntasks, on the same text")
        print_table(tasks)
    if "perplexity" in result:
        print_next(f'onward generate {quote(options.model)} "Once upon"')


def of_texts(
    models: "Sequence[LanguageModel | str]", names: Sequence[str], options: Options, replicas: "Replicas"
) -> None:
    """Evaluate several models on the same texts; the first one is already loaded."""
    from onward.cli.commands.evaluate.divided import load_alike

    if not options.sources:
        raise UserError(f"Cannot compare {' and '.join(names)} without a text: name one after them")
    rows = []
    for name, model in zip(names, models):
        lm = load_alike(model, options, replicas) if isinstance(model, str) else model
        rows.append({"model": name} | asdict(of_text(replace(options, model=name), lm, replicas)(lm)))
    if not replicas.rank:
        print_json({"results": rows}) if options.json else print_table(rows)


Measure = Callable[["LanguageModel"], Any]


def of_text(options: Options, lm: "LanguageModel", replicas: "Replicas") -> Measure:
    """Return a function that evaluates a model on the texts of the options or, without any, on its run's validation
    text."""
    from onward.cli.shared.sources import announce
    from onward.data.sources import documents
    from onward.evaluation.text import evaluate_texts, evaluate_tokens

    check_not_given(options, OF_EXAMPLES, f"{options.model} is evaluated on texts")
    if options.sources:
        announce(options.sources)
        texts = list(documents(options.sources, **{name: getattr(options, name) for name in OF_TEXT[1:]}))
        warn_of_unknown(lm.tokenizer, texts)
        return lambda lm: evaluate_texts(lm.model, lm.text(), texts, options.stride, replicas)
    inputs = inputs_of(options)
    if inputs is None or inputs.validation is None:
        raise UserError(f"{options.model} has no validation text of its own: name a text to evaluate on")
    tokens, n_bytes = inputs.validation, inputs.validation_bytes
    return lambda lm: evaluate_tokens(lm.model, lm.text(), tokens, options.stride, n_bytes, replicas)


def of_tasks(options: Options, replicas: "Replicas") -> None:
    from onward.cli.commands.evaluate.tasks import Exam, evaluate_tasks
    from onward.evaluation.tasks.task import COMMAS, Task, tasks_of, with_text
    from onward.text.tokenizer import Tokenizer

    def is_foreign(word: str) -> bool:
        """Whether a task belongs to lm-evaluation-harness."""
        is_file = word.endswith((".yaml", ".yml"))
        if not is_file and (not word.isidentifier() or word in Task.kinds):
            return False
        if is_file and not Path(word).is_file():
            raise UserError(f"Cannot find the task file {word}: name a task of lm-evaluation-harness")
        if find_spec("lm_eval") is None:
            unknown = " needs a library" if is_file else f" is not a task of Onward: {nearest(word, Task.choices())}"
            raise UserError(f"{word}{unknown} (lm-evaluation-harness, with its tasks: pip install 'onward[eval]')")
        return True

    check_not_given(options, (*OF_TEXT, *OF_EXAMPLES), "tasks ask questions")
    words = [word.strip() for word in COMMAS.split(options.tasks)] if options.tasks else []
    foreign = [word for word in words if is_foreign(word)]
    ours = ", ".join(word for word in words if word not in foreign)
    inputs = inputs_of(options)
    text = inputs.validation_text(Tokenizer.load(options.model)) if inputs else ""
    tasks = [*(with_text(tasks_of(ours), text) if ours else []), *own_questions(options)]
    exam = Exam(tasks, foreign, **{name: getattr(options, name) for name in ASKED})
    evaluate_tasks([options.model, *options.sources], options, exam, options.json, replicas)


def check_not_given(options: Options, names: Sequence[str], reason: str) -> None:
    if given := [name for name in names if getattr(options, name) != getattr(Options, name)]:
        kind = "texts" if given[0] in OF_TEXT else "examples"
        raise UserError(f"{given[0]} applies to {kind}, but {reason}: leave it out")


def own_questions(options: Options) -> "Iterator[Task]":
    from onward.evaluation.tasks.files import Answers, Choices
    from onward.evaluation.tasks.judged import Judged

    if options.choices:
        yield Choices(options.choices)
    if options.judge and not options.judge_model:
        raise UserError(f"judge is {options.judge}, an address without a model: name its model with --judge-model")
    if options.judge:
        yield Judged(options.answers, options.judge, options.judge_model)
    elif options.answers:
        yield Answers(options.answers, options.match)


def of_examples(options: Options, lm: "LanguageModel", replicas: "Replicas") -> Measure:
    """Return a function that evaluates a head on the examples of the options or, without any, on the held-out examples
    of its run."""
    from onward.data.layouts import Records
    from onward.evaluation.heads import evaluate_head, examples_of

    check_not_given(options, OF_TEXT, f"{options.model} is evaluated on examples")
    if options.sources:
        examples = examples_of(lm.model, lm.text(), Records(options.sources, options.columns, options.ignore))
        return lambda lm: evaluate_head(lm.model, examples, replicas)
    if (held_out := getattr(inputs_of(options), "held_out", None)) is None:
        raise UserError(f"{options.model} has no held-out examples of its own: name a .jsonl file of examples")
    return lambda lm: evaluate_head(lm.model, held_out, replicas)


def inputs_of(options: Options) -> "Inputs | None":
    """The inputs of the run in the model's folder; None if the folder is not a run."""
    from onward.training import stages as tasks

    folder = Path(options.model)
    return tasks.inputs_of(folder) if (folder / "inputs.json").exists() else None
