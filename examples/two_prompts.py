"""The smallest decoder that answers: 37 parameters, 5 tokens, 2 sentences to learn by heart.

"what is statquest" and "statquest is what" have the same tokens in another order, and both are to be continued with
"awesome". Width 2, sinusoidal positions, one attention layer with a residual and nothing else. It also shows a bug
worth knowing: the loss taken over the wrong axis, which no error betrays as long as there are as many places as
tokens. With --lightning, Lightning's Trainer does the training of the same model.
"""

import argparse
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import onward

WORDS = ["what", "is", "statquest", "awesome", "EOS"]
PROMPTS = ["what is statquest EOS", "statquest is what EOS"]
EPOCHS, LEARNING_RATE = 30, 0.1


def ids(text: str) -> list[int]:
    """One id per word."""
    return [WORDS.index(word) for word in text.split()]


SENTENCES = torch.tensor([ids(f"{prompt} awesome EOS") for prompt in PROMPTS])
INPUTS, TARGETS = SENTENCES[:, :-1], SENTENCES[:, 1:]  # each (B, T): the target at a place is the token after it


def new_model(seed: int) -> onward.Decoder:
    """Embeddings 5 x 2, queries, keys and values 2 x 2 each, a head of 2 x 5 with 5 biases."""
    torch.manual_seed(seed)
    return onward.Decoder(
        onward.DecoderConfig(
            vocab_size=len(WORDS),
            d_model=2,
            n_layers=1,
            n_heads=1,
            context_length=6,
            position=onward.Sinusoidal(),
            attention=onward.SelfAttention(out=False),
            norm=onward.NoNorm(),
            block=onward.AttentionOnly(),
            head_bias=True,
        )
    )


def right_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Logits (B, T, V), targets (B, T): every place is one choice among V tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def wrong_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """cross_entropy looks for the choices in axis 1. Here that is T: the places compete instead of the tokens."""
    return F.cross_entropy(logits, targets)


def train(model: onward.Decoder, loss: Callable[[Tensor, Tensor], Tensor] = right_loss) -> float:
    """Both sentences in one batch, 30 times; returns the last loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        value = loss(model(INPUTS), TARGETS)
        value.backward()
        optimizer.step()
    return value.item()


def train_with_lightning(model: onward.Decoder) -> None:
    """The same, with the loop left to Lightning: a decoder is a plain nn.Module."""
    try:
        from lightning import LightningModule, Trainer
    except ImportError:
        raise SystemExit("--lightning needs the package lightning: pip install 'onward[lightning]'") from None

    class TwoPrompts(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            inputs, targets = batch
            return right_loss(self.model(inputs), targets)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=LEARNING_RATE)

    batches = DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=len(INPUTS))
    trainer = Trainer(max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(TwoPrompts(), batches)


@torch.inference_mode()
def continuation(model: onward.Decoder, prompt: str) -> str:
    """The likeliest token, again and again, until EOS or the end of the context."""
    tokens, answer = ids(prompt), ""
    while len(tokens) < model.config.context_length and not answer.endswith("EOS"):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        answer = f"{answer} {WORDS[tokens[-1]]}".strip()
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of the weights (default: 1)")
    parser.add_argument("--lightning", action="store_true", help="train under Lightning's Trainer")
    options = parser.parse_args()

    model = new_model(options.seed)
    for name, parameter in model.named_parameters():
        print(f"{name:24} {tuple(parameter.shape)!s:8} {parameter.numel():3}")
    print(f"{'parameters':33} {sum(p.numel() for p in model.parameters()):3}\n")

    if options.lightning:
        train_with_lightning(model)
        train(plain := new_model(options.seed))
        apart = max((a - b).abs().max().item() for a, b in zip(model.parameters(), plain.parameters()))
        print(f"Trained by Lightning: the weights differ by {apart} from those of the plain loop.")
    else:
        print(f"Trained: the loss is {train(model):.4f}.")
    for prompt in PROMPTS:
        print(f"  {prompt} -> {continuation(model, prompt)}")

    logits = model(INPUTS)
    print(f"\nThe bug: cross_entropy gets logits {tuple(logits.shape)} and targets {tuple(TARGETS.shape)} as they are.")
    wrong = new_model(options.seed)
    print(f"T = V = 5, so nothing complains, and in training that loss falls to {train(wrong, wrong_loss):.4f}.")
    right = right_loss(wrong(INPUTS), TARGETS)
    print(f"The right loss of the same model is {right:.4f}, of a guess ln 5 = {math.log(5):.4f}; and it says:")
    for prompt in PROMPTS:
        print(f"  {prompt} -> {continuation(wrong, prompt)}")
    print("(With another --seed it may even answer well, by accident: trust the right loss, and more than one seed.)")
    try:
        wrong_loss(logits[:, :4], TARGETS[:, :4])
    except (RuntimeError, ValueError) as error:
        print(f"With sentences one token shorter it shows at once: {error}")


if __name__ == "__main__":
    main()
