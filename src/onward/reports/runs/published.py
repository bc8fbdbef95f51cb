"""Published figures of other models, to compare with those of a model of similar size. Does not import torch.

Each figure has its source. Figures of one task are comparable only if they were measured in the same way: the suite and
the number of examples are part of the comparison.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import log

CORE, HARNESS = "CORE", "lm-evaluation-harness"
NANOCHAT = "https://github.com/karpathy/nanochat/blob/master/"
PYTHIA = "https://github.com/EleutherAI/pythia/blob/main/evals/pythia-v1/"
GPT2_PAPER = "Radford et al. 2019, Language Models are Unsupervised Multitask Learners, table 3"
NEAREST = 2  # number of other models shown beside a result


@dataclass(frozen=True)
class PublishedResult:
    model: str
    parameters: int
    suite: str  # program and data of the measurement
    task: str  # the suite's name for the task
    metric: str
    examples: int
    score: float
    source: str


# some tasks of CORE with their numbers of few-shot examples
CORE_TASKS = {"hellaswag_zeroshot": 0, "lambada_openai": 0, "hellaswag": 10, "piqa": 10, "arc_easy": 10}
CORE_TASKS |= {"arc_challenge": 10}
GPT2 = {  # number of parameters, CORE, scores at CORE_TASKS
    "GPT-2": (124_439_808, 0.1139, 0.309, 0.323, 0.308, 0.623, 0.412, 0.222),
    "GPT-2 Medium": (354_823_168, 0.1849, 0.390, 0.426, 0.395, 0.670, 0.480, 0.262),
    "GPT-2 Large": (774_030_080, 0.2146, 0.440, 0.488, 0.444, 0.698, 0.535, 0.264),
    "GPT-2 XL": (1_557_611_200, 0.256525, 0.502, 0.523, 0.512, 0.725, 0.595, 0.299),
}
ENWIK8 = {"GPT-2": 1.16, "GPT-2 Medium": 1.01, "GPT-2 Large": 0.97, "GPT-2 XL": 0.93}  # bits per byte
# zero-shot, at the last step: acc of these tasks, then acc_norm of arc_challenge
PYTHIA_TASKS = "lambada_openai", "piqa", "winogrande", "arc_easy", "sciq"
PYTHIA_SIZES = {
    "70m": (70_426_624, 0.1846, 0.5947, 0.5280, 0.3737, 0.6010, 0.2210),
    "160m": (162_322_944, 0.3284, 0.6273, 0.5312, 0.4352, 0.7410, 0.2329),
    "410m": (405_334_016, 0.5162, 0.6676, 0.5367, 0.5210, 0.8110, 0.2432),
    "1.4b": (1_414_647_808, 0.6161, 0.7089, 0.5730, 0.6065, 0.8650, 0.2858),
}


def figures() -> Iterator[PublishedResult]:
    for model, (size, core, *scores) in GPT2.items():
        source = NANOCHAT + "dev/estimate_gpt3_core.ipynb"
        yield PublishedResult(model, size, CORE, "CORE", "centered", 0, core, source)
        for (task, examples), score in zip(CORE_TASKS.items(), scores, strict=True):
            yield PublishedResult(model, size, CORE, task, "acc", examples, score, source)
        yield PublishedResult(model, size, "a text", "enwik8", "bits per byte", 0, ENWIK8[model], GPT2_PAPER)
    readme = "https://github.com/karpathy/nanochat, README of October 2025"
    yield PublishedResult("nanochat d20", 561_000_000, CORE, "CORE", "centered", 0, 0.2219, readme)
    for name, (size, *scores, challenge) in PYTHIA_SIZES.items():
        model, source = f"Pythia {name}", f"{PYTHIA}pythia-{name}/zero-shot/{name}_step143000.json"
        for task, score in zip(PYTHIA_TASKS, scores, strict=True):
            yield PublishedResult(model, size, HARNESS, task, "acc", 0, score, source)
        yield PublishedResult(model, size, HARNESS, "arc_challenge", "acc_norm", 0, challenge, source)


def nearest(parameters: int, suite: str, task: str, metric: str, examples: int) -> list[PublishedResult]:
    """Results of the models nearest in size, for the same task, metric and number of examples."""
    # suites differ in the rules of a task: for piqa, one compares sums of log-probabilities, another means over tokens
    same = [f for f in figures() if (f.suite, f.task, f.metric, f.examples) == (suite, task, metric, examples)]
    return sorted(same, key=lambda figure: abs(log(figure.parameters / max(1, parameters))))[:NEAREST]
