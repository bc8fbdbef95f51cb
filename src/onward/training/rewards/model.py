"""A reward model, trained by `--method reward`, as a reward."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from onward.base.errors import UserError
from onward.training.rewards.reward import Reward, Scorer

if TYPE_CHECKING:
    from onward.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Model(Reward, kind="model"):
    """The output of a reward model for the tokens of a prompt and its completion, as the reward of the completion."""

    folder: str  # folder of the reward model, or its name on the hub; it needs the vocabulary of the trained model

    @property
    def label(self) -> str:
        return Path(self.folder).name or self.kind

    def open(self, tokenizer: Tokenizer | None = None, device: str = "auto") -> Scorer:
        import torch

        from onward.base.device import choose_device
        from onward.checkpoint.peft.adapters import load_with_adapters
        from onward.evaluation.outputs import outputs
        from onward.hub.folder import locate
        from onward.transforms.heads import REWARD, head_labels

        folder = locate(self.folder)
        model, _, source = load_with_adapters(folder, dtype=torch.float32, device=choose_device(device))
        if head_labels(model) != REWARD:
            raise UserError(f"reward is {folder}, which has no reward head: train a reward model with --method reward")
        known = source.tokenizer()
        if tokenizer and (known is None or known.inner.get_vocab() != tokenizer.inner.get_vocab()):
            raise UserError(
                f"the vocabulary of the reward model {folder} differs from that of the trained model: train a reward "
                "model on the same base model"
            )
        model.eval().requires_grad_(False)
        return lambda completions: outputs(model, [[*c.prompt_tokens, *c.tokens] for c in completions])[:, 0].tolist()
