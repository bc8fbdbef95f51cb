"""Small charts of the figures that a run records besides its loss, such as gradient norms; figures recorded per layer
have one line per layer."""

from collections import defaultdict
from statistics import fmean

import numpy as np

from onward.reports.pictures.markup import embedded
from onward.reports.pictures.plot import Frame, Heights, Series, plot
from onward.reports.runs.metrics import Metrics

KINDS = {  # name in metrics.jsonl (without "/LAYER"): title, logarithmic axis, and how to read it
    "learning_rate": ("learning rate", False, "the size of the optimizer's steps"),
    "grad_norm": ("gradient norm", True, "before clipping; a jump often precedes a loss spike"),
    "update_ratio": ("update ratio", True, "norm of an update over norm of the weights; about 0.001 is usual"),
    "attention_entropy": ("attention entropy", False, "nats; 0: a token attends to one token; high: to all equally"),
    "dead_units": ("dead units", False, "share of the feed-forward units that are never active"),
    "expert_load": ("expert load", False, "tokens of the busiest expert over the mean; 1 is even"),
    "set_loss": (
        "validation loss of each source",
        False,
        "a source whose loss still falls is still being learned",
    ),
    "task": ("tasks", False, "share of right answers at each validation; see the report card for chance and errors"),
    "accuracy": ("accuracy", False, "how often the chosen answer is ranked higher, or the likeliest class is right"),
    "margin": ("margin", False, "reward of the chosen answer minus that of the rejected one"),
    "calibration_error": (
        "calibration error",
        False,
        "difference between confidence and accuracy; 0 is perfect calibration",
    ),
    "reward": ("reward", False, "mean over the generated completions, in total and for each reward"),
    "length": ("length", False, "tokens of a completion"),
    "ended": ("ended", False, "share of the completions that end by themselves"),
    "entropy": ("entropy", False, "nats per token; near 0 all completions of a prompt are the same"),
    "kl": ("KL divergence", False, "nats per token from the model at the start"),
    "clip_share": ("clip share", False, "share of the tokens whose probability ratio is clipped"),
    "rollout_share": ("share of rollouts", False, "share of a step's time spent on generating completions"),
    "logprob_gap": ("gap of engine and trainer", True, "largest difference of log-probabilities; 1e-4 at most in fp32"),
}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 290.0, 124.0, 50.0, 272.0, 8.0, 98.0
POINTS = 160  # largest number of points of a line; each is the highest value of a stretch of steps
ALL_POINTS = 2400  # largest number of points of all lines of a chart, but each line may have 30

Lines = dict[str, list[tuple[float, float]]]  # layer or other name ("": a single line) -> (step, value), in order


def charts(metrics: Metrics, other: Metrics | None = None, other_name: str = "") -> str:
    """One chart for each kind of figure recorded at two steps or more, with the lines of `other` over them."""
    lines, others = recorded(metrics), recorded(other) if other else {}
    return "".join(
        figure(kind, lines[kind], metrics, others.get(kind, {}), other, other_name)
        for kind in KINDS
        if any(len(line) > 1 for line in lines.get(kind, {}).values())
    )


def recorded(metrics: Metrics) -> dict[str, Lines]:
    """Recorded figures by kind, such as gradient norms, and by layer or other name ("": a single line)."""
    lines: dict[str, Lines] = defaultdict(lambda: defaultdict(list))
    for row in metrics.rows:
        for key, value in row.items():
            kind, _, layer = key.partition("/")
            line = lines[kind][layer]
            if not line or line[-1][0] != row["step"]:  # a validation measures some figures of a step again
                line.append((row["step"], value))
    return lines


def figure(
    kind: str, lines: Lines, metrics: Metrics, other_lines: Lines, other: Metrics | None, other_name: str
) -> str:
    """One line per layer or, for rewards, per reward and for the sum; of `other`, the sum or the mean over layers."""
    title, log, reading = KINDS[kind]
    most = max(30, min(POINTS, ALL_POINTS // len(lines)))
    drawn = {layer: thinned(line, most) for layer, line in lines.items()}
    theirs = mean([thinned(line, most) for line in totals(other_lines)])
    failed = [row["failed_step"] for row in metrics.rollbacks]

    ends = metrics.coordinates([1, *failed, max(row["step"] for row in metrics.rows)])
    if other and len(theirs):
        ends = np.concatenate([ends, other.coordinates(theirs[-1:, 0])], axis=1)
    frame = Frame(WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM, np.stack([ends[:, 0], ends.max(axis=1)], axis=1))
    y = axis(frame, np.concatenate([*(line[:, 1] for line in drawn.values()), theirs[:, 1]]), log)

    tables: dict[bytes, np.ndarray] = {}  # lines recorded at the same steps share their coordinates
    series = [Series("rollback", "marks", metrics.coordinates(failed), np.zeros(len(failed)))]
    for i, (layer, line) in enumerate(drawn.items()):
        coordinates = tables.setdefault(line[:, 0].tobytes(), metrics.coordinates(line[:, 0]))
        name = f"layer {int(layer)}" if layer.isdecimal() else layer or title
        series.append(Series("smooth", "line", coordinates, y(line[:, 1]), name, line[:, 1], (i + 1) / len(drawn)))
    if other and len(theirs):
        name = f"{other_name}: mean" if len(totals(other_lines)) > 1 else other_name
        series.append(Series("other", "line", other.coordinates(theirs[:, 0]), y(theirs[:, 1]), name, theirs[:, 1]))
    svg, data = plot(frame, series, y.grid(4), f"{title} by training step", 4)
    now = fmean(line[-1][1] for line in totals(lines))
    note = "logarithmic axis; " * log + reading
    return (
        f'<figure class="chart"><h3>{title} <b>{now:.3g}</b></h3>{svg}<p class="readout">{note}</p>'
        f'<script type="application/json">{embedded(data)}</script></figure>'
    )


def totals(lines: Lines) -> list[list[tuple[float, float]]]:
    """The total, which is under "", or all lines if there is no total."""
    return [lines[""]] if "" in lines else [*lines.values()]


def axis(frame: Frame, values: np.ndarray, log: bool) -> Heights:
    """An axis that suits `values`: linear from 0 to at most 3 times the 95th percentile, if positive, with higher
    values at the edge; logarithmic from no lower than a thousandth of the median."""
    positive = values[values > 0]
    if log and len(positive):
        low, high = max(positive.min(), np.median(positive) / 1000), positive.max()
        return Heights(frame, low / 1.25, high * 1.25, log=True)
    robust = min(values.max(), 3 * float(np.quantile(values, 0.95)))
    return Heights(frame, 0.0, next((high for high in (robust, values.max()) if high > 0), 1.0))


def thinned(line: list[tuple[float, float]], most: int) -> np.ndarray:
    """At most `most` points (N, 2): each stretch of points becomes its first step with its highest value."""
    stretches = np.array_split(np.array(line, float), min(len(line), most))
    return np.array([(stretch[0, 0], stretch[:, 1].max()) for stretch in stretches])


def mean(lines: list[np.ndarray]) -> np.ndarray:
    """Mean line (N, 2) of lines recorded at the same steps, cut to the shortest."""
    count = min(map(len, lines), default=0)
    return np.mean([line[:count] for line in lines], axis=0) if count else np.empty((0, 2))
