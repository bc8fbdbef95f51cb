"""Small decoders that together use every part and every option, with weights for which each of these affects the
output."""

from typing import Any

import torch
from torch import Tensor

from onward import (
    XIELU,
    Alibi,
    AttentionAndMamba2,
    AttentionOnly,
    BranchNorm,
    Decoder,
    DecoderConfig,
    DifferentialAttention,
    DynamicScaling,
    Experts,
    FeedForwardOnly,
    Gated,
    GatedDeltaNet,
    Indexer,
    LatentAttention,
    LayerNorm,
    Learned,
    LinearScaling,
    Llama3Scaling,
    LogScale,
    LongRoPEScaling,
    Mamba2,
    NoAttention,
    NoNorm,
    NoPosition,
    Parallel,
    Plain,
    PostNorm,
    PowerScale,
    PreNorm,
    ProportionalScaling,
    RMSNorm,
    Rotary,
    Sandwich,
    SelfAttention,
    SharedIndexer,
    SharedNorm,
    ShortConvolution,
    SigmoidGate,
    SigmoidRouting,
    Sinusoidal,
    SoftmaxRouting,
    SoftplusGate,
    YaRNScaling,
)

from support.devices import on_device
from support.own_parts import MeansBlock, ShiftedBlock, TwiceBlock

LENGTH = 12  # context_length of all decoders


def config(**changes: Any) -> DecoderConfig:
    sizes = {"vocab_size": 13, "d_model": 16, "n_layers": 2, "n_heads": 4, "context_length": LENGTH}
    return DecoderConfig(**{**sizes, **changes})


DECODERS = {
    "llama": config(n_kv_heads=2),
    "gpt2": config(
        position=Learned(),
        norm=LayerNorm(),
        mlp=Plain(act="gelu_tanh", bias=True),
        attention=SelfAttention(bias=True, out_bias=True),
        tied=True,
    ),
    "gpt": config(
        position=Learned(offset=2), norm=LayerNorm(eps=1e-3), block=PostNorm(), mlp=Plain(act="relu"), head_bias=True
    ),
    "vaswani": config(position=Sinusoidal(theta=100), norm=LayerNorm(bias=False), mlp=Plain(), d_ff=20),
    "neox": config(position=Rotary(fraction=0.5), norm=LayerNorm(), block=Parallel(), mlp=Plain(act="relu2")),
    "some layers without rotary": config(
        position=(Rotary(theta=100), NoPosition()), n_layers=3, attention=SelfAttention(qk_norm="head"), n_kv_heads=1
    ),
    "bloom": config(position=Alibi(), n_heads=3, d_head=4, norm=LayerNorm(), block=SharedNorm(), mlp=Plain()),
    "alibi in windows": config(
        position=Alibi(steepness=4.0),
        n_heads=6,
        n_kv_heads=3,
        d_head=8,
        attention=(SelfAttention(window=3), SelfAttention()),
    ),
    "no-output": config(
        position=NoPosition(),
        attention=SelfAttention(out=False),
        block=AttentionOnly(),
        norm=NoNorm(),
    ),
    "gemma2": config(
        n_layers=3,
        n_kv_heads=2,
        d_head=6,
        block=Sandwich(),
        norm=RMSNorm(offset=1.0, eps=1e-6),
        attention=(SelfAttention(window=4, attn_softcap=2.0, scale=0.3), SelfAttention(attn_softcap=2.0, scale=0.3)),
        mlp=Gated(act="gelu_tanh"),
        embed_scale=4.0,
        logit_softcap=3.0,
        tied=True,
    ),
    "gpt-oss": config(
        n_kv_heads=2,
        attention=(SelfAttention(window=3, sinks=True, bias=True), SelfAttention(sinks=True)),
        mlp=Experts(count=5, top_k=3, d_ff=12, router=SoftmaxRouting(bias=True), bias=True, backend="loop"),
    ),
    "granite": config(
        block=PreNorm(residual_scale=0.22),
        embed_scale=12.0,
        logit_scale=0.25,
        attention=SelfAttention(scale=0.1),
        mlp=Gated(act="gelu", bias=True),
    ),
    "xielu": config(position=Sinusoidal(offset=2, order="halves"), mlp=XIELU(bias=True, d_ff=20)),
    "routers": config(
        n_layers=4,
        mlp=tuple(
            Experts(count=6, top_k=3, d_ff=8, router=router, backend="loop")
            for router in (
                SoftmaxRouting(selection_bias=True, min_sum=0.9),
                SoftmaxRouting(softcap=0.5, n_groups=2, top_k_groups=1, group_top_k=2),
                SigmoidRouting(selection_bias=False, softcap=2.0, n_groups=3, top_k_groups=2, group_top_k=1),
                SigmoidRouting(bias_on="logits", min_sum=0.1),
            )
        ),
    ),
    "experts without a gate": config(
        mlp=tuple(
            Experts(count=4, act="relu2", d_ff=8, d_shared=12, gated=False, d_latent=latent, bias=True, backend="loop")
            for latent in (0, 6)
        )
    ),
    "one branch in each layer": config(
        n_layers=3,
        block=(AttentionOnly(residual_scale=0.5), FeedForwardOnly(), FeedForwardOnly(residual_scale=0.5)),
        attention=(SelfAttention(), NoAttention(), NoAttention()),
        norm=(RMSNorm(weight=False), LayerNorm(weight=False), LayerNorm(offset=1.0)),
    ),
    "scaled branches": config(
        n_layers=5,
        block=tuple(block(residual_scale=0.5) for block in (PostNorm, Sandwich, BranchNorm, Parallel, SharedNorm)),
    ),
    "olmo2": config(attention=SelfAttention(qk_norm="width"), n_kv_heads=2, final_norm=LayerNorm()),
    "deepseek": config(
        n_layers=3,
        attention=(
            LatentAttention(d_latent=5, d_nope=6, d_rope=4, d_value=3, norm_eps=0.01),
            LatentAttention(d_latent=40, d_query_latent=7, d_nope=2, d_rope=2, d_value=3, bias=True, scale=0.3),
        ),
        mlp=(
            Gated(),
            Experts(
                act="relu",
                router=SoftmaxRouting(renormalize=False, scale=2.0, n_groups=4, top_k_groups=2),
                d_shared=20,
                backend="loop",
            ),
            Experts(
                count=6,
                router=SigmoidRouting(n_groups=3, top_k_groups=2, scale=1.5, renormalize=False),
                d_shared=8,
                shared_gate=True,
                backend="loop",
            ),
        ),
    ),
    "indexers": config(
        n_layers=3,
        attention=(
            LatentAttention(5, 7, 6, 4, 3, indexer=Indexer(top_k=5, n_heads=16, d_head=6)),
            LatentAttention(5, 7, 6, 4, 3, indexer=SharedIndexer(), gate=SigmoidGate()),
        ),
    ),
    "opt-350m": config(
        position=Learned(offset=2), d_embed=6, embed_norm=LayerNorm(), block=PostNorm(), final_norm=NoNorm(), tied=True
    ),
    "scaled turns": config(
        n_layers=6,
        position=(
            Rotary(scaling=LinearScaling(factor=3.0)),
            Rotary(scaling=YaRNScaling(factor=4.0, original=4, truncate=False, beta_fast=3, beta_slow=0.5), theta=100),
            Rotary(scaling=YaRNScaling(factor=3.0, attention_factor=0.9)),
            Rotary(scaling=Llama3Scaling(factor=4.0, low_frequency=0.5, high_frequency=3.0, original=16)),
            Rotary(scaling=DynamicScaling(factor=2.0, original=5)),
            Rotary(scaling=LongRoPEScaling(short=(1.0, 1.5), long=(2.0, 3.0), original=6, attention_factor=1.2)),
        ),
        block=(BranchNorm(), PreNorm()),
        attention=(SelfAttention(clip=0.5, qk_norm="heads"), SelfAttention(qk_norm="heads")),
        n_kv_heads=2,
    ),
    "sizes per part": config(
        n_layers=4,
        n_kv_heads=2,
        attention=(
            SelfAttention(window=4, n_heads=6, n_kv_heads=3, qk_norm="width", sinks=True),
            SelfAttention(n_kv_heads=1, d_head=8, d_value=6, value_scale=0.7, qk_norm="heads"),
            LatentAttention(d_latent=5, d_nope=6, d_rope=4, d_value=3, n_heads=3),
        ),
        mlp=(Gated(d_ff=24), Plain(d_ff=12), Experts(d_ff=10, count=3, backend="loop"), Gated()),
    ),
    "gates and factors by position": config(
        n_layers=4,
        n_kv_heads=2,
        attention=(
            SelfAttention(gate=SigmoidGate(bias=True), query_scale=LogScale(original=3)),
            SelfAttention(gate=SoftplusGate(head_bias=True), query_scale=PowerScale(original=2), d_value=6),
            LatentAttention(
                d_latent=5,
                d_nope=6,
                d_rope=4,
                d_value=3,
                gate=SigmoidGate(),
                query_scale=LogScale(0.5, 2, 1),
            ),
            SelfAttention(qk_norm="head", norm_rotated=True, qk_norm_part=LayerNorm(), gate=SigmoidGate(per="head")),
        ),
    ),
    "differential": config(
        n_layers=3,
        n_kv_heads=2,
        attention=(
            DifferentialAttention(window=4, bias=True),
            DifferentialAttention(n_heads=8, n_kv_heads=4, d_head=6, out_bias=True, head_norm=RMSNorm()),
            DifferentialAttention(lambda_init=0.3),
        ),
    ),
    "chunks": config(
        attention=(
            SelfAttention(window=5, chunked=True, qk_norm="head", qk_norm_part=RMSNorm(weight=False)),
            SelfAttention(query_scale=LogScale(original=3, offset=1)),
        ),
        position=(Rotary(), NoPosition()),
    ),
    "shared keys": config(
        n_layers=6,
        n_kv_heads=2,
        attention=(
            SelfAttention(window=4, value_norm=RMSNorm(weight=False), qk_norm="head"),
            SelfAttention(values_are_keys=True, value_norm=RMSNorm(), qk_norm="head", n_kv_heads=1, d_head=8),
            SelfAttention(window=4, n_heads=8),
            SelfAttention(window=4, shares_kv=True, qk_norm="head", n_heads=8),
            SelfAttention(shares_kv=True, n_kv_heads=1, d_head=8, gate=SigmoidGate()),
            SelfAttention(window=4, shares_kv=True),
        ),
        position=tuple(
            Rotary(theta=100, scaling=ProportionalScaling(0.5, 2.0)) if layer in (1, 4) else Rotary()
            for layer in range(6)
        ),
    ),
    "gated delta": config(
        n_layers=4,
        attention=(
            GatedDeltaNet(n_heads=2, n_value_heads=4, d_key=6, d_value=3),
            SelfAttention(window=4),
            GatedDeltaNet(d_conv=2, negative=True, gate="sigmoid", norm_eps=0.1),
            GatedDeltaNet(n_heads=2, d_key=5, decay="element", gate="sigmoid", rank=3),
        ),
    ),
    "mamba2": config(
        n_layers=3,
        position=NoPosition(),
        attention=(
            Mamba2(n_heads=4, d_head=6, n_groups=2, d_state=5),
            Mamba2(n_heads=2, d_head=4, d_state=7, conv_bias=False, bias=True, norm="before_gate"),
            Mamba2(d_head=8, d_state=3, d_conv=3, step_min=0.05, norm="none", norm_eps=0.1),
        ),
        block=(AttentionOnly(), PreNorm(), PreNorm()),
    ),
    "attention and mamba2": config(
        n_kv_heads=2,
        attention=AttentionAndMamba2(
            SelfAttention(scale=0.3, value_scale=0.7),
            Mamba2(n_heads=4, d_head=6, n_groups=2, d_state=5, norm="none", scales=(0.5, 1.5, 0.7, 1.1, 2.0)),
            0.6,
        ),
    ),
    "short convolution": config(n_layers=3, attention=(ShortConvolution(), SelfAttention(), ShortConvolution(2, True))),
    "own parts": config(
        n_layers=4,
        n_kv_heads=2,
        block=(TwiceBlock(), ShiftedBlock(), MeansBlock(), TwiceBlock()),
        attention=(SelfAttention(), SelfAttention(window=4), SelfAttention(), GatedDeltaNet(n_heads=2, d_key=6)),
    ),
    "own block": config(block=TwiceBlock(), attention=(SelfAttention(window=4), SelfAttention())),
    "everything about scores": config(
        position=(Alibi(), Rotary()),
        n_heads=6,
        n_kv_heads=2,
        d_head=4,
        block=(PreNorm(), Sandwich()),
        attention=SelfAttention(window=4, attn_softcap=3.0, sinks=True, qk_norm="head", bias=True),
        norm=(RMSNorm(), LayerNorm()),
        final_norm=NoNorm(),
    ),
}


@torch.no_grad()
def decoder(config: DecoderConfig, dtype: torch.dtype = torch.float32) -> Decoder:
    """A decoder on the test's device; every parameter, including biases and sinks, is random and large enough to affect
    the output."""
    torch.manual_seed(0)
    model = Decoder(config).to(dtype).eval()
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    return on_device(model)


def token_ids(config: DecoderConfig, rows: int = 2, length: int = LENGTH) -> Tensor:
    """Random token ids (rows, length) on the test's device."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(config.vocab_size, (rows, length), generator=generator)


def assert_close(got: Tensor, wanted: Tensor, share: float = 1e-5) -> None:
    """Assert that two tensors are equal within `share` times the largest value, or times 1 if all values are
    smaller."""
    assert got.shape == wanted.shape
    assert got.dtype == wanted.dtype
    largest = max(1.0, wanted.abs().max().item())
    torch.testing.assert_close(got, wanted, rtol=0, atol=share * largest)
