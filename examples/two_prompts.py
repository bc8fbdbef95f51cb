"""A decoder with 37 parameters and 5 tokens, which memorizes 2 sentences.

"what is attention" and "attention is what" have the same tokens in a different order; both are continued with
"awesome". The model has width 2, sinusoidal positions, and one attention layer with a residual connection. The example
also shows a common bug: a loss over the wrong axis, which raises no error as long as the sequence length equals the
vocabulary size. With --lightning, Lightning's Trainer trains the same model.
"""

import argparse
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import onward

WORDS = ["what", "is", "attention", "awesome", "EOS"]
PROMPTS = ["what is attention EOS", "attention is what EOS"]
EPOCHS, LEARNING_RATE = 30, 0.1


def ids(text: str) -> list[int]:
    """One id per word."""
    return [WORDS.index(word) for word in text.split()]


SENTENCES = torch.tensor([ids(f"{prompt} awesome EOS") for prompt in PROMPTS])
INPUTS, TARGETS = SENTENCES[:, :-1], SENTENCES[:, 1:]  # each (B, T): the target of a token is the one after it


def new_model(seed: int) -> onward.Decoder:
    """Parameters: embedding 5 x 2; queries, keys and values 2 x 2 each; head 2 x 5 and 5 biases."""
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
    """The cross-entropy of logits (B, T, V) and targets (B, T) over V classes, averaged over B * T tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def wrong_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """A bug: cross_entropy takes axis 1 as the classes, which here is T instead of V."""
    return F.cross_entropy(logits, targets)


def train(model: onward.Decoder, loss: Callable[[Tensor, Tensor], Tensor] = right_loss) -> float:
    """Train on both sentences in one batch, EPOCHS times; return the last loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        value = loss(model(INPUTS), TARGETS)
        value.backward()
        optimizer.step()
    return value.item()


def train_with_lightning(model: onward.Decoder) -> None:
    """The same training by Lightning: a decoder is a plain nn.Module."""
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
    """Greedy decoding until EOS or the end of the context."""
    tokens, answer = ids(prompt), ""
    while len(tokens) < model.config.context_length and not answer.endswith("EOS"):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        answer = f"{answer} {WORDS[tokens[-1]]}".strip()
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="seed of the weights (default: 1)")
    parser.add_argument("--lightning", action="store_true", help="train with Lightning's Trainer")
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
    print(f"T = V = 5, so no error is raised, and in training that loss falls to {train(wrong, wrong_loss):.4f}.")
    right = right_loss(wrong(INPUTS), TARGETS)
    print(f"The right loss of the same model is {right:.4f}; a uniform guess has ln 5 = {math.log(5):.4f}. It answers:")
    for prompt in PROMPTS:
        print(f"  {prompt} -> {continuation(wrong, prompt)}")
    print("(With another --seed it may answer correctly by accident: judge by the right loss and several seeds.)")
    try:
        wrong_loss(logits[:, :4], TARGETS[:, :4])
    except (RuntimeError, ValueError) as error:
        print(f"With sentences one token shorter it shows at once: {error}")


if __name__ == "__main__":
    main()
