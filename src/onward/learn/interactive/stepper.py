"""One token on its way through a decoder, step by step."""

from onward.api.language_model import LanguageModel
from onward.learn.interactive.figure import InteractiveFigure
from onward.reports.explain.page import explain


def stepper(lm: LanguageModel, text: str, position: int = -1, layer: int = 0) -> InteractiveFigure:
    """The steps of `onward explain` for the token at `position` of a text, with block `layer` in detail: names, shapes
    and numbers of one forward pass."""
    story = explain(lm.model, lm.text(), text, position, layer)
    steps = [
        {
            "title": step.title,
            "shape": step.shape,
            "formula": step.formula,
            "text": step.text,
            "panels": [{"title": panel.title, **panel.data} for panel in step.panels],
        }
        for step in story.steps
    ]
    return InteractiveFigure(
        "stepper", story.title, "Step with the buttons or the slider. Shapes are those of all tokens.", {"steps": steps}
    )
