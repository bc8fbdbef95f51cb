"""A reward model, trained by `--method reward`, as the reward of completions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from onward.checkpoint.peft.adapters import load_with_adapters
from onward.device import choose_device
from onward.errors import UserError
from onward.evaluation.outputs import outputs
from onward.text.tokenizer import Tokenizer
from onward.training.reinforcement.rewards import Reward, reward_of
from onward.transforms.heads import REWARD, head_labels


class RewardModel:
    """The reward model in a folder, for token ids of the vocabulary of `tokenizer`. A UserError if its vocabulary
    differs, or if the model has no head of rewards."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, device: str) -> None:
        model, _, own = load_with_adapters(folder, dtype=torch.float32, device=choose_device(device))
        if head_labels(model) != REWARD:
            raise UserError(f"reward is {folder}, a model without rewards: train one with --method reward")
        if (known := own.tokenizer()) is None or known.inner.get_vocab() != tokenizer.inner.get_vocab():
            raise UserError(f"the reward model {folder} has another vocabulary: train one from the same model")
        self.model = model.eval().requires_grad_(False)

    def of_tokens(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """The reward of each sequence of token ids, a prompt with its completion."""
        return outputs(self.model, sequences)[:, 0].tolist()


def open_reward(name: str, tokenizer: Tokenizer, device: str) -> Reward | RewardModel:
    """The reward of a name: a reward model if it is a folder, else as `reward_of`."""
    folder = Path(name)
    return RewardModel(folder, tokenizer, device) if folder.is_dir() else reward_of(name)
