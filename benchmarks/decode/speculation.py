"""Speculative decoding with a draft whose tokens the target accepts at a known rate."""

import re
from dataclasses import replace
from functools import partial
from statistics import median

import torch

import onward
from benchmarks.decode.bench import Bench
from benchmarks.decode.models import SEED, prompt, random_model
from benchmarks.decode.tables import Table, in_turns
from onward.generation import ModelDraft
from onward.measuring.generation import read_bytes, serve

ACCEPTANCE = 0.8
SHARPER = 8.0  # factor of the head's weights that makes the distributions about as sharp as a trained model's


@torch.no_grad()
def pair(config: onward.DecoderConfig, draft_layers: int, target_layers: int) -> tuple[onward.Decoder, onward.Decoder]:
    """A draft model and a target model in fp32. The target consists of the draft's layers and further layers, whose
    outputs are scaled down until the target accepts a fraction of ACCEPTANCE of the draft's tokens."""
    draft = random_model(replace(config, n_layers=draft_layers))
    target = random_model(replace(config, n_layers=target_layers))
    draft.head.weight.mul_(SHARPER)
    target.load_state_dict(draft.state_dict(), strict=False)
    added = re.compile(r"blocks\.(\d+)\.(attn\.out|mlp\.down)\.weight")
    named = ((added.fullmatch(name), weight) for name, weight in target.named_parameters())
    outputs = [weight for match, weight in named if match and int(match[1]) >= draft_layers]
    originals = [weight.clone() for weight in outputs]
    tokens = torch.tensor([prompt(config, 64, seed) for seed in range(4)])
    proposed, low, high = draft(tokens).softmax(-1), 0.0, 1.0
    for _ in range(8):
        middle = (low + high) / 2
        for weight, original in zip(outputs, originals):
            torch.mul(original, middle, out=weight)
        accepted = float(torch.minimum(target(tokens).softmax(-1), proposed).sum(-1).mean())
        low, high = (middle, high) if accepted > ACCEPTANCE else (low, middle)
    return draft, target


def speculation(bench: Bench) -> Table:
    """Decoding with and without a draft, at temperature 1."""
    sizes = bench.sizes
    draft, target = (model.to(torch.bfloat16) for model in pair(sizes.config, sizes.draft_layers, sizes.target_layers))
    proposals = ModelDraft(draft)
    engines = {
        "without a draft": onward.Engine(target, rows=1),
        "with a draft": onward.Engine(target, rows=1, draft=proposals),
    }
    requests: dict[str, onward.Request] = {}

    def speed(name: str) -> float:
        """Tokens per second; the same tokens are sampled each time."""
        tokens = prompt(sizes.config, sizes.prompt)
        requests[name] = onward.Request(tokens, onward.Sampling(temperature=1.0), sizes.new, seed=SEED)
        return serve(engines[name], [requests[name]]).decode_speed

    speeds = in_turns({name: partial(speed, name) for name in engines}, bench.rounds)
    done, drafted = requests["with a draft"], proposals.num_draft_tokens
    acceptance = done.num_accepted / max(done.num_drafted, 1)
    cost = read_bytes(draft, draft.embed) / read_bytes(target, target.embed)
    ceiling = sum(acceptance**i for i in range(drafted + 1)) / (1 + drafted * cost)
    table = Table(
        f"Speculation in bf16: draft of {sizes.draft_layers} layers, target of {sizes.target_layers}",
        ["", "tokens/s", "best", "speed-up"],
        notes=[
            f"{acceptance:.0%} of {done.num_drafted} draft tokens accepted, {len(done.tokens) / done.steps:.2f} "
            f"tokens per step; the draft reads {cost:.0%} of the target's bytes, which limits the speed-up to "
            f"{ceiling:.2f} with {drafted} tokens drafted at a time"
        ],
    )
    for name, found in speeds.items():
        table.rows.append([name, median(found), max(found), median(found) / median(speeds["without a draft"])])
    return table
