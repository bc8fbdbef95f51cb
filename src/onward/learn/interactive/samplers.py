"""Samplers applied to the logits of a model."""

from collections.abc import Sequence

from torch import stack

from onward.api.language_model import LanguageModel
from onward.base.errors import UserError
from onward.inspection.inputs import logits
from onward.learn.interactive.figure import InteractiveFigure
from onward.reports.runs.look import distributions


def samplers(lm: LanguageModel, texts: Sequence[str]) -> InteractiveFigure:
    """Sliders for temperature, top-k, top-p and min-p, applied to the model's logits for the token after each of
    `texts`."""
    if not texts:
        raise UserError("texts is empty: give at least one text, after which the model predicts a token")
    tokenizer = lm.text()
    tokens = [tokenizer.begin(tokenizer.encode(text)) for text in texts]
    z = stack([logits(lm.model, each)[-1] for each in tokens])  # (texts, V)
    return InteractiveFigure(
        "samplers",
        "Samplers applied to the logits of a trained model",
        "Gray bars: the model's own probabilities. Colored bars: after temperature, top-k, top-p and min-p, in this "
        "order.",
        {**distributions(z, (), tokenizer, z.size(-1)), "texts": [*texts]},
    )
