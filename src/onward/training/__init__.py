"""Training steps, losses, fine-tuning methods, rewards and environments."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from onward.config.ranges import Positive
    from onward.training.environments.environment import Environment
    from onward.training.losses.answers import Answers, PairLoss, sequence_logprobs
    from onward.training.losses.distillation import divergence
    from onward.training.losses.scoring import reward_loss
    from onward.training.methods.answers.classify import Classify
    from onward.training.methods.answers.distill import Distill
    from onward.training.methods.answers.draft import Drafting
    from onward.training.methods.answers.reward import RewardModelling
    from onward.training.methods.answers.sft import SFT
    from onward.training.methods.completions.cispo import CISPO
    from onward.training.methods.completions.grpo import GRPO
    from onward.training.methods.completions.gspo import GSPO
    from onward.training.methods.completions.online_dpo import OnlineDPO
    from onward.training.methods.completions.policy import GroupMethod, PolicyMethod
    from onward.training.methods.completions.ppo import PPO
    from onward.training.methods.completions.rloo import RLOO
    from onward.training.methods.completions.sapo import SAPO
    from onward.training.methods.preferences.apo import APO
    from onward.training.methods.preferences.bco import BCO
    from onward.training.methods.preferences.cpo import CPO
    from onward.training.methods.preferences.discopop import DiscoPOP
    from onward.training.methods.preferences.dpo import DPO
    from onward.training.methods.preferences.exo import EXO
    from onward.training.methods.preferences.hinge import Hinge
    from onward.training.methods.preferences.ipo import IPO
    from onward.training.methods.preferences.kto import KTO
    from onward.training.methods.preferences.mixed import Mixed
    from onward.training.methods.preferences.nca import NCA
    from onward.training.methods.preferences.orpo import ORPO
    from onward.training.methods.preferences.pairs import ComparedPairs
    from onward.training.methods.preferences.robust import Robust
    from onward.training.methods.preferences.simpo import SimPO
    from onward.training.methods.preferences.sppo import SPPO
    from onward.training.reinforcement.policy import PolicyGradient
    from onward.training.reinforcement.policy_losses import (
        clipped,
        gae,
        group_advantages,
        kl_estimate,
        leave_one_out,
        value_loss,
    )
    from onward.training.rewards.reward import Completion, Reward, reward_of
    from onward.training.rewards.sum import OpenReward
    from onward.training.run.loop import Diverged
    from onward.training.stages import inputs_of
    from onward.training.step.average import Average
    from onward.training.step.balance import Balance
    from onward.training.step.health import Spikes
    from onward.training.step.loss import CrossEntropy
    from onward.training.step.optimizer import optimizers
else:
    from onward.base.public import lazily

    __getattr__, __dir__ = lazily(__name__)

__all__ = [
    "APO",
    "BCO",
    "CISPO",
    "CPO",
    "DPO",
    "EXO",
    "GRPO",
    "GSPO",
    "IPO",
    "KTO",
    "NCA",
    "ORPO",
    "PPO",
    "RLOO",
    "SAPO",
    "SFT",
    "SPPO",
    "Answers",
    "Average",
    "Balance",
    "Classify",
    "ComparedPairs",
    "Completion",
    "CrossEntropy",
    "DiscoPOP",
    "Distill",
    "Diverged",
    "Drafting",
    "Environment",
    "GroupMethod",
    "Hinge",
    "Mixed",
    "OnlineDPO",
    "OpenReward",
    "PairLoss",
    "PolicyGradient",
    "PolicyMethod",
    "Positive",
    "Reward",
    "RewardModelling",
    "Robust",
    "SimPO",
    "Spikes",
    "clipped",
    "divergence",
    "gae",
    "group_advantages",
    "inputs_of",
    "kl_estimate",
    "leave_one_out",
    "optimizers",
    "reward_loss",
    "reward_of",
    "sequence_logprobs",
    "value_loss",
]
