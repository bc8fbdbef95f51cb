"""The methods of fine-tuning in one table: the examples that each makes of records, and its loss."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from onward.checkpoint.folder import load_model
from onward.data.examples import Form, judged, preferred, prompted, supervised
from onward.hub import locate
from onward.model.decoder import Decoder
from onward.training import preferences
from onward.training.answers import Frozen, JudgedLoss, PairLoss, Reference
from onward.training.base import base_tokenizer, load_base
from onward.training.distillation import Distillation
from onward.training.finetuning import FinetuneConfig
from onward.training.loss import CrossEntropy, Loss
from onward.training.reinforcement import PolicyGradient, PolicyOptions
from onward.training.rewards import reward_of


@dataclass(frozen=True)
class Method:
    """A method: what is new in it beside the loop of training, which all share."""

    form: Form  # the examples that it makes of records
    loss: Callable[[FinetuneConfig], Loss]
    by_example: bool = False  # whether the loss is a mean over examples, and not over targets
    reference: bool = False  # whether the loss compares the model with the one that it began from
    packs: bool = True  # whether several examples may be in a row


def next_token(config: FinetuneConfig) -> Loss:
    """The cross-entropy of the trained tokens."""
    return CrossEntropy(config.z_loss, config.label_smoothing, config.loss_chunk)


def base(config: FinetuneConfig) -> Decoder:
    """The model that fine-tuning begins from."""
    return load_base(config)[0]


def of_margins(loss: Callable[[Tensor, FinetuneConfig], Tensor], config: FinetuneConfig) -> Loss:
    """A loss of the margins between the scores of pairs."""
    return PairLoss(lambda c, r, mc, mr: loss(c - r, config), config.beta, Reference(partial(base, config)))


def of_mean_margins(loss: Callable[[Tensor, FinetuneConfig], Tensor], config: FinetuneConfig) -> Loss:
    """A loss of the margins between the mean scores of pairs."""
    return PairLoss(lambda c, r, mc, mr: loss(mc - mr, config), config.beta, Reference(partial(base, config)))


def of_means(loss: Callable[[Tensor, Tensor, FinetuneConfig], Tensor], config: FinetuneConfig) -> Loss:
    """A loss of the mean log-probabilities of pairs, without a reference."""
    return PairLoss(lambda c, r, mc, mr: loss(mc, mr, config), config.beta)


def of_judged(config: FinetuneConfig) -> Loss:
    """The loss of KTO."""
    loss = partial(preferences.kto, beta=config.beta, desirable=config.desirable, undesirable=config.undesirable)
    return JudgedLoss(loss, config.beta, Reference(partial(base, config)))


dpo = partial(of_margins, lambda m, c: preferences.dpo(m, c.beta, c.label_smoothing))
robust = partial(of_margins, lambda m, c: preferences.robust(m, c.beta, c.label_smoothing))
hinge = partial(of_margins, lambda m, c: preferences.hinge(m, c.beta))
ipo = partial(of_mean_margins, lambda m, c: preferences.ipo(m, c.beta))
orpo = partial(of_means, lambda a, b, c: preferences.orpo(a, b, c.beta))
simpo = partial(of_means, lambda a, b, c: preferences.simpo(a, b, c.beta, c.gamma, c.label_smoothing))


def distilled(config: FinetuneConfig) -> Loss:
    """The divergence from a teacher."""
    load = lambda: load_model(locate(config.teacher), torch.float32)[0]
    return Distillation(Frozen(load), config.mix, config.temperature, config.loss_chunk)


def policy_gradient(config: FinetuneConfig) -> Loss:
    """The loss of rewarded completions."""
    options = PolicyOptions(
        method="rloo" if config.method == "rloo" else "grpo",
        samples=config.samples,
        completion_length=config.completion_length,
        temperature=config.temperature,
        reduction=config.reduction,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        kl=config.kl,
        iterations=config.iterations,
    )
    reference = Reference(partial(base, config))
    return PolicyGradient(options, base_tokenizer(config), reward_of(config.reward), reference)


METHODS: dict[str, Method] = {
    "sft": Method(supervised, next_token),
    "dpo": Method(preferred, dpo, by_example=True, reference=True),
    "ipo": Method(preferred, ipo, by_example=True, reference=True),
    "hinge": Method(preferred, hinge, by_example=True, reference=True),
    "robust": Method(preferred, robust, by_example=True, reference=True),
    "kto": Method(judged, of_judged, by_example=True, reference=True),
    "orpo": Method(preferred, orpo, by_example=True),
    "simpo": Method(preferred, simpo, by_example=True),
    "distill": Method(supervised, distilled),
    "grpo": Method(prompted, policy_gradient, packs=False),
    "rloo": Method(prompted, policy_gradient, packs=False),
}
