"""Losses of a head for rewards or classes: reward models, and classification as in GPT-1.

Shapes: S sequences, M examples, D d_model, N outputs.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from onward.data.packing import ExampleBatch
from onward.evaluation.outputs import calibration_bins, calibration_error
from onward.model.decoder import Decoder
from onward.training.losses.answers import hidden_states, logprobs_of, preference_figures
from onward.training.step.loss import Loss, Sums
from onward.transforms.heads import head_of


def reward_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0, center: float = 0.0) -> Tensor:
    """Compute -log s(r(chosen) - r(rejected) - margin) + center (r(chosen) + r(rejected))^2, (M,), from the rewards
    (M,) of the chosen and the rejected answers of M pairs, where s is the logistic sigmoid (Bradley and Terry 1952).
    `margin` is that of Touvron et al. 2023, equation 2, and `center` that of Eisenstein et al. 2023."""
    return -F.logsigmoid(chosen - rejected - margin) + center * (chosen + rejected).square()


@dataclass(frozen=True)
class RewardLoss(Loss):
    """The loss of a reward model: an answer's reward is the output of the reward head after its last token. Each pair
    is a chosen and a rejected answer, in this order, with an optional `margin`."""

    center: float = 0.0

    def __call__(self, model: Decoder, batch: ExampleBatch) -> Sums:
        """Return the sums over pairs of the loss and of the figures."""
        rewards = head_of(model)(hidden_states(model, batch)[batch.lasts])[:, 0]
        chosen, rejected = rewards[::2], rewards[1::2]
        margin = batch.numbers["margin"].to(rewards.dtype) if "margin" in batch.numbers else 0.0
        loss = reward_loss(chosen, rejected, margin, self.center).sum()
        figures = preference_figures(chosen.detach(), rejected.detach())
        gap = (chosen - rejected).detach()
        right = (gap > 0).float() + 0.5 * (gap == 0)
        return loss, loss.detach(), figures | calibration_bins(gap.abs().sigmoid(), right)

    def summarize(self, figures: dict[str, float]) -> dict[str, float]:
        """Replace the sums of each confidence bin by the calibration error; the confidence is s(|r - r'|)."""
        return calibration_error(figures)


@dataclass(frozen=True)
class ClassLoss(Loss):
    """The loss of a classifier (Radford et al. 2018, equation 5): the cross-entropy of the label, from the outputs
    after the last token, and `lm_weight` times the mean cross-entropy of the text's tokens."""

    lm_weight: float = 0.0

    def __call__(self, model: Decoder, batch: ExampleBatch) -> Sums:
        """Return the sums over examples of the loss and of the figures."""
        hidden = hidden_states(model, batch)
        logits = head_of(model)(hidden[batch.lasts])
        labels = batch.numbers["label"].long()
        of_labels = F.cross_entropy(logits, labels, reduction="sum")
        confidence, chosen = logits.detach().softmax(-1).max(-1)
        right = (chosen == labels).float()
        figures = {"accuracy": right.sum(), "label_loss": of_labels.detach(), **calibration_bins(confidence, right)}
        loss = of_labels
        if self.lm_weight:
            of_text = -logprobs_of(model, hidden, batch).mean.sum()
            loss = loss + self.lm_weight * of_text
            figures["text_loss"] = of_text.detach()
        return loss, loss.detach(), figures

    def summarize(self, figures: dict[str, float]) -> dict[str, float]:
        """Replace the sums of each confidence bin by the calibration error; the confidence is the probability of the
        likeliest class."""
        return calibration_error(figures)
