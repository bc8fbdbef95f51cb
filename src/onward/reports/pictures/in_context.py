"""The picture of how a model's answers change as examples are added to a prompt."""

from onward.base.fields import counted
from onward.evaluation.in_context import LikelyAnswers, Shots
from onward.reports.pictures.markup import MARKS, readable
from onward.reports.pictures.panels import bars, curves, unique
from onward.reports.pictures.picture import LINE_MARKS, Picture

DRAWN = 6  # largest number of curves


def in_context(shots: Shots, alternatives: LikelyAnswers) -> Picture:
    """Draw how solved examples in the prompt (`shots`) change a model's answers to a question: the probabilities of up
    to six answers in `alternatives` over the number of examples, and the probabilities of all answers with all
    examples."""
    names = [shown(answer) for answer in alternatives.answers]
    last = unique(names, [row[-1] for row in alternatives.probabilities])
    panels = []
    if len(alternatives.counts) > 1:
        series = dict(zip(list(last)[:DRAWN], alternatives.probabilities))
        panels.append(curves("probability of an answer", alternatives.counts, series, x_name="examples"))
    count = alternatives.counts[-1]
    panels.append(bars(f"with {counted(count, 'example')}", last, unit="%"))
    about = (
        "The probability of each answer after the question, with more and more examples before it. A model that "
        "learns in context raises the probability of answers that follow the pattern of the examples; its weights "
        "do not change."
    )
    return Picture(shots.question, about, panels)


def shown(answer: str) -> str:
    """Show an answer on one line, with a visible mark for a leading space."""
    space = answer.startswith(" ")
    return MARKS[" "] * space + readable(answer[space:], LINE_MARKS)
