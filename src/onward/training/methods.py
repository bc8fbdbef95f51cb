"""The table of fine-tuning methods."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from onward.checkpoint.load import load_model
from onward.data.forms import Form, classified, judged, preferred, prompted, supervised
from onward.hub import locate
from onward.model.decoder import Decoder
from onward.training.finetuning import preferences
from onward.training.finetuning.answers import Frozen, JudgedLoss, PairLoss, Reference
from onward.training.finetuning.base import base_tokenizer, load_base
from onward.training.finetuning.config import FinetuneConfig
from onward.training.finetuning.distillation import Distillation, OnPolicy
from onward.training.finetuning.scoring import ClassLoss, RewardLoss
from onward.training.reinforcement.policy import PolicyGradient, PolicyOptions
from onward.training.rewards.reward import reward_of
from onward.training.step.loss import CrossEntropy, Loss
from onward.transforms.heads import REWARD, VALUE


@dataclass(frozen=True)
class Method:
    """A method of fine-tuning: the examples it makes of records, its loss, and how its examples are packed."""

    form: Form  # the examples that it makes of records
    loss: Callable[[FinetuneConfig], Loss]
    by_example: bool = False  # whether the loss is a mean over examples, and not over targets
    reference: bool = False  # whether the loss compares the model with the one that it began from
    packs: bool = True  # whether several examples may be in a row
    labels: tuple[str, ...] = ()  # of the head of outputs that it trains; those of `classify` are in its data


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
    loss = Distillation(Frozen(load), config.mix, config.temperature, config.loss_chunk)
    if not config.on_policy:
        return loss
    return OnPolicy(loss, config.on_policy, config.completion_length, base_tokenizer(config))


def of_rewards(config: FinetuneConfig) -> Loss:
    """The loss of a reward model."""
    return RewardLoss(config.center)


def of_classes(config: FinetuneConfig) -> Loss:
    """The loss of a classifier."""
    return ClassLoss(config.lm_weight)


def policy_gradient(config: FinetuneConfig) -> Loss:
    """The loss of rewarded completions."""
    options = PolicyOptions(
        method=config.method,  # type: ignore[arg-type]  # one of the three
        samples=config.samples,
        completion_length=config.completion_length,
        temperature=config.temperature,
        reduction=config.reduction,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        kl=config.kl,
        iterations=config.iterations,
        discount=config.discount,
        gae_lambda=config.gae_lambda,
        value_weight=config.value_weight,
    )
    tokenizer = base_tokenizer(config)
    return PolicyGradient(
        options, tokenizer, reward_of(config.reward), Reference(partial(base, config)), device=config.device
    )


METHODS: dict[str, Method] = {
    "sft": Method(supervised, next_token),
    "dpo": Method(preferred, dpo, by_example=True, reference=True),
    "ipo": Method(preferred, ipo, by_example=True, reference=True),
    "hinge": Method(preferred, hinge, by_example=True, reference=True),
    "robust": Method(preferred, robust, by_example=True, reference=True),
    "kto": Method(judged, of_judged, by_example=True, reference=True),
    "orpo": Method(preferred, orpo, by_example=True),
    "simpo": Method(preferred, simpo, by_example=True),
    "reward": Method(preferred, of_rewards, by_example=True, labels=REWARD),
    "classify": Method(classified, of_classes, by_example=True),
    "distill": Method(supervised, distilled),
    "grpo": Method(prompted, policy_gradient, packs=False),
    "rloo": Method(prompted, policy_gradient, packs=False),
    "ppo": Method(prompted, policy_gradient, packs=False, labels=VALUE),
}
