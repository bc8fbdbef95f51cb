"""How often a sampled token depends on the other requests of an engine.

    python -m benchmarks.batch_invariance [--draws 100000] [--vocabulary 50257] [--model FOLDER]

The same 8 requests are decoded alone, together, and together with 32 others. Tokens are drawn from every vector of
logits with many seeds. For each vocabulary, model, precision and number of requests, the command prints the largest
difference from the logits of a request alone, and how many of 100,000 draws differ. The models have width 64 and 2
layers: random weights, and weights trained for 100 steps on sequences in which each token depends on the previous one,
with noise from a Zipf distribution. --model FOLDER measures another model instead.
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor

import onward
from onward.kernels.llvm.draws import draws

REQUESTS, OTHERS, NEW = 8, 32, 47
VOCABULARIES = [23, 512, 50_257, 151_936]


def text(vocabulary: int, rows: int, length: int, seed: int) -> Tensor:
    """Tokens (rows, length): each after the first is 5 times the previous one plus a random number from a Zipf
    distribution, modulo the vocabulary size."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(rows, length, generator=generator, dtype=torch.float64).reciprocal().clamp(max=vocabulary).long()
    tokens = [noise[:, 0] % vocabulary]
    for column in noise.T[1:]:
        tokens.append((5 * tokens[-1] + column) % vocabulary)
    return torch.stack(tokens, 1)


def models(vocabulary: int, weights: list[str]) -> Iterator[tuple[str, onward.Decoder]]:
    """Yield the models named in `weights`: "random", then "trained", which is the same model after training."""
    torch.manual_seed(0)
    model = onward.Decoder(onward.DecoderConfig(vocabulary, d_model=64, n_layers=2, n_heads=4))
    plain = model.head.weight.detach().clone()
    if "random" in weights:
        model.head.weight.data.mul_(20)  # gives the logits the spread of a trained model's logits
        yield "random", model.eval()
        model.head.weight.data.copy_(plain)
    if "trained" not in weights:
        return
    trainer = onward.Trainer(model.train(), [torch.optim.AdamW(model.parameters())], lambda step: 3e-3)
    windows = (text(vocabulary, 8, 65, seed) for seed in range(1, 101))
    batches = (onward.Batch(tokens[:, :-1], tokens[:, 1:]) for tokens in windows)
    for _ in trainer.train(onward.StepPlan([batch]) for batch in batches):
        pass
    yield "trained", model.eval()


def logits(model: onward.Decoder, tokens: Tensor, rows: int) -> Tensor:
    """The logits (8, 47, V) of 8 sequences in an engine with `rows` rows; more sequences fill the other rows."""
    found: list[list[Tensor]] = [[] for _ in range(REQUESTS)]

    def follow(number: int) -> onward.Sampling:
        """Sampling that forces the tokens of a sequence, and keeps the logits if it is one of the first 8."""

        def process(before: list[int], logits: Tensor) -> Tensor:
            if number < REQUESTS:
                found[number].append(logits.clone())
            return torch.full_like(logits, -torch.inf).index_fill_(0, tokens[number, len(before)], 0.0)

        return onward.Sampling(processors=(process,))

    engine = onward.Engine(model, rows=rows)
    for number in range(max(rows, REQUESTS)):
        engine.add(onward.Request([int(tokens[number, 0])], follow(number), NEW))
    for _ in engine.run():
        pass
    return torch.stack([torch.stack(row) for row in found])


def drawn(z: Tensor, count: int) -> Tensor:
    """About `count` tokens drawn from logits (N, V), with one seed after the other, as the engine draws them."""
    index, factors, found = torch.arange(len(z)), torch.ones(len(z)), []
    for seed in range(-(-count // len(z))):
        tokens, seeds = torch.empty_like(index), torch.full_like(index, seed)
        addresses = (t.data_ptr() for t in (tokens, z))
        others = (t.data_ptr() for t in (factors, seeds, index))
        draws("float32", False)(*addresses, 0, *others, z.size(1), len(z), torch.get_num_threads())
        found.append(tokens)
    return torch.stack(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=100_000)
    parser.add_argument("--vocabulary", type=int, nargs="*", default=VOCABULARIES)
    parser.add_argument("--weights", nargs="*", default=["random", "trained"])
    parser.add_argument("--model", default="")
    options = parser.parse_args()
    print("| vocabulary | weights | precision | requests | largest difference of logits | draws that differ |")
    print("| --- | --- | --- | --- | --- | --- |")
    given = [("", onward.load(options.model, dtype=torch.float32, device="cpu").model)] if options.model else []
    for name, model in given or (pair for size in options.vocabulary for pair in models(size, options.weights)):
        tokens = text(model.config.vocab_size, REQUESTS + OTHERS, 1 + NEW, 0)
        for dtype in torch.float32, torch.bfloat16:
            state = {key: value.clone() for key, value in model.state_dict().items()}
            model.to(dtype)
            alone = logits(model, tokens, 1).flatten(0, 1)
            expected = drawn(alone, options.draws)
            for rows in REQUESTS, REQUESTS + OTHERS:
                batch = logits(model, tokens, rows).flatten(0, 1)
                rate = float((drawn(batch, options.draws) != expected).double().mean()) * 100_000
                figures = f"{float((batch - alone).abs().max()):.1e} | {rate:.1f}"
                named = f"{batch.size(1):,} | {name} | {str(dtype).removeprefix('torch.')} | {rows}"
                print(f"| {named} | {figures} |", flush=True)
            model.float().load_state_dict(state)


if __name__ == "__main__":
    main()
