"""New weights have the standard deviations in the table of `initialize`."""

import pytest
import torch

from onward import (
    AttentionOnly,
    Block,
    Decoder,
    DecoderConfig,
    Experts,
    LayerNorm,
    Learned,
    Parallel,
    Plain,
    PostNorm,
    PreNorm,
    RMSNorm,
    Sandwich,
    SelfAttention,
    SharedNorm,
)
from onward.model import build_norm

from support.decoders import DECODERS, LENGTH
from support.devices import on_device

N = {PreNorm(): 2, PreNorm(0.5): 2, PostNorm(): 2, Sandwich(): 2, Parallel(): 2, SharedNorm(): 2, AttentionOnly(): 1}


def fresh(block: Block | tuple[Block, ...], **changes: object) -> Decoder:
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "d_model": 64, "n_layers": 3, "n_heads": 4, "context_length": 256}
    return on_device(Decoder(DecoderConfig(**{**sizes, "block": block, **changes})))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("block", "additions"),
    [*((block, 3 * n) for block, n in N.items()), ((PreNorm(), AttentionOnly()), 2 + 1 + 2)],
    ids=str,
)
@pytest.mark.parametrize("mlp", [Plain(bias=True), Experts(count=3, d_shared=5)], ids=["plain", "experts"])
def test_matrices_have_std_002_and_ends_of_branches_less(mlp: Plain | Experts, block: Block, additions: int) -> None:
    attention = SelfAttention(bias=True, out_bias=True, sinks=True)
    model = fresh(block, mlp=mlp, attention=attention, position=Learned(), norm=LayerNorm(), head_bias=True)
    ends = 0
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            assert parameter.unique().item() == (1 if name.endswith("norm.weight") else 0), name
            continue
        end = name.endswith(("attn.out.weight", "mlp.down.weight", "mlp.down", "mlp.shared.down.weight"))
        ends += end
        std = 0.02 / additions**0.5 if end else 0.02
        spread = 4 / (2 * parameter.numel()) ** 0.5  # four standard errors
        assert parameter.std().item() == pytest.approx(std, rel=spread), name
        assert abs(parameter.mean().item()) < 5 * std / parameter.numel() ** 0.5, name
    assert ends >= 3


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_fresh_norms_have_unit_output(offset: float) -> None:
    norm = on_device(build_norm(RMSNorm(offset=offset), DECODERS["llama"], width=8))
    x = torch.randn(5, 8) * 7
    torch.testing.assert_close(norm(x).square().mean(-1), torch.ones(5))


@pytest.mark.parametrize("config", DECODERS.values(), ids=DECODERS.keys())
def test_fresh_model_predicts_uniformly(config: DecoderConfig) -> None:
    torch.manual_seed(0)
    model = on_device(Decoder(config))
    tokens = torch.randint(config.vocab_size, (8, LENGTH))
    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
    assert loss.item() == pytest.approx(torch.tensor(config.vocab_size).log().item(), abs=0.15)


def test_the_seed_decides_the_weights() -> None:
    a, b = fresh(PreNorm()), fresh(PreNorm())
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))
