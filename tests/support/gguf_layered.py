"""Small decoders for further architectures of llama.cpp."""

from dataclasses import replace
from typing import Any, cast

from onward import (
    AttentionOnly,
    DecoderConfig,
    Experts,
    FeedForwardOnly,
    Gated,
    GatedDeltaNet,
    Indexer,
    LatentAttention,
    LayerNorm,
    LinearScaling,
    Llama3Scaling,
    LogScale,
    LongRoPEScaling,
    Mamba2,
    NoAttention,
    NoPosition,
    PreNorm,
    RMSNorm,
    Rotary,
    SelfAttention,
    SharedIndexer,
    SharedNorm,
    SigmoidGate,
    SigmoidRouting,
    SoftmaxRouting,
    YaRNScaling,
)
from onward.checkpoint.gguf.gemma3n import sparsity
from onward.config.attention_options import SoftplusGate
from onward.config.decoder import XIELU, AttentionAndMamba2
from onward.config.scaling import yarn_magnitude
from onward.families.bitnet import NormedAttention, NormedGated
from onward.families.falcon_h1 import ScaledGated
from onward.families.gemma3n_text import AltUpBlock, SparseGated
from onward.families.llama4_text import InputWeightedExperts
from onward.families.muse_glimmer_text import MuseBlock
from onward.families.step3p5 import LimitedExperts, LimitedGated

LENGTH = 40
MAMBA = Mamba2(4, 16, 2, 16)


def small(**changes: Any) -> DecoderConfig:
    sizes = {"vocab_size": 37, "d_model": 32, "n_layers": 2, "n_heads": 4, "d_ff": 64, "context_length": LENGTH}
    return DecoderConfig(**{**sizes, **changes})


def nemotron(experts: Experts) -> DecoderConfig:
    return small(
        attention=(MAMBA, NoAttention(), SelfAttention(), NoAttention()),
        position=NoPosition(),
        mlp=experts,
        block=(AttentionOnly(), FeedForwardOnly(), AttentionOnly(), FeedForwardOnly()),
        n_layers=4,
        n_kv_heads=2,
        d_head=16,
    )


ONE_BRANCH = Experts(6, 3, 32, SigmoidRouting(scale=2.5), d_shared=48, act="relu2", gated=False)
FULL = SelfAttention(d_value=8, value_scale=0.7)
NEAR = replace(FULL, window=8, sinks=True, n_kv_heads=2)
NORMED = SelfAttention(qk_norm="head", qk_norm_part=RMSNorm(1e-5, weight=False), window=8192, chunked=True)
INPUT_WEIGHTED = InputWeightedExperts(6, 2, 48, SigmoidRouting(False, selection_bias=False), d_shared=48)
GATED = SelfAttention(qk_norm="head", gate=SoftplusGate("head"))
LAGUNA = Experts(6, 3, 32, SigmoidRouting(scale=2.5), d_shared=48)
SINKS = SelfAttention(scale=0.1, sinks=True)
LOCAL = (False, True, True, True)

COMPUTED: dict[str, DecoderConfig] = {
    "apertus": small(attention=SelfAttention(qk_norm="head"), mlp=XIELU(), n_kv_heads=2),
    "bitnet": small(attention=NormedAttention(), mlp=NormedGated(), n_kv_heads=2, tied=True),
    "hunyuan-moe": small(
        attention=SelfAttention(qk_norm="head", norm_rotated=True),
        mlp=Experts(6, 3, d_shared=64),
        n_kv_heads=2,
        d_head=16,
    ),
    "dbrx": small(norm=LayerNorm(bias=False), attention=SelfAttention(clip=0.5), mlp=Experts(6, 3), n_kv_heads=2),
    "nemotron_h_moe": nemotron(ONE_BRANCH),
    "nemotron_h_moe: latent": nemotron(replace(ONE_BRANCH, d_latent=16, d_ff=24)),
    "mamba2": small(attention=MAMBA, position=NoPosition(), block=AttentionOnly(), n_heads=1, d_ff=1, tied=True),
    "falcon-h1": small(attention=AttentionAndMamba2(SelfAttention(), MAMBA), n_kv_heads=2, d_head=16),
    "falcon-h1: without a norm": small(
        attention=AttentionAndMamba2(SelfAttention(), replace(MAMBA, n_heads=2, norm="none")), position=Rotary(1e11)
    ),
    "mimo2": small(
        attention=(FULL, NEAR, NEAR),
        position=(Rotary(500.0, 0.34), Rotary(100.0, 0.34), Rotary(100.0, 0.34)),
        mlp=(Gated(), *[Experts(6, 3, 32, SigmoidRouting())] * 2),
        n_layers=3,
        n_kv_heads=1,
        d_head=24,
    ),
    "llama4": small(
        attention=(NORMED, NORMED, NORMED, SelfAttention(query_scale=LogScale(0.1, 8192, 1)), NORMED),
        position=(*[Rotary(500.0)] * 3, NoPosition(), Rotary(500.0)),
        mlp=(Gated(), INPUT_WEIGHTED, Gated(), INPUT_WEIGHTED, Gated()),
        n_layers=5,
        n_kv_heads=2,
        d_head=16,
    ),
    "mellum": small(
        attention=tuple(SelfAttention(8 * one, qk_norm="head") for one in LOCAL),
        position=tuple(Rotary(500.0, scaling=None if one else YaRNScaling(4.0, 8)) for one in LOCAL),
        mlp=Experts(6, 3, 32),
        n_layers=4,
        n_kv_heads=2,
    ),
    "cohere2moe": small(
        attention=tuple(SelfAttention(8 * one) for one in LOCAL),
        position=(*[Rotary(500.0)] * 4,),
        mlp=(Gated(), *[Experts(6, 3, 32, SigmoidRouting(selection_bias=False), d_shared=64)] * 3),
        block=SharedNorm(),
        logit_scale=0.25,
        n_layers=4,
        n_kv_heads=2,
        tied=True,
    ),
    "cohere2moe: softmax, LayerNorm": small(
        attention=(SelfAttention(8), SelfAttention()),
        position=(Rotary(500.0), NoPosition()),
        mlp=Experts(6, 3, 32, SoftmaxRouting(scale=0.5), d_shared=32),
        norm=LayerNorm(bias=False),
        block=SharedNorm(),
        tied=True,
    ),
    "granite_swa": small(
        attention=tuple(replace(SINKS, window=8 * one) for one in LOCAL),
        position=(NoPosition(), *[Rotary(500.0)] * 3),
        block=PreNorm(0.22),
        embed_scale=12.0,
        logit_scale=0.25,
        n_layers=4,
        n_kv_heads=2,
        tied=True,
    ),
    "granite_swa: experts": small(
        attention=(replace(SINKS, scale=None), replace(SINKS, scale=None, window=8)), mlp=Experts(6, 3)
    ),
    "laguna": small(
        attention=tuple(replace(GATED, window=8 * one, n_heads=4 - 2 * one) for one in LOCAL),
        position=tuple(Rotary(100.0) if one else Rotary(500.0, 0.5, scaling=YaRNScaling(4.0, 8)) for one in LOCAL),
        mlp=(Gated(), *[LAGUNA] * 3),
        n_layers=4,
        n_kv_heads=2,
    ),
    "laguna: gates of elements": small(
        attention=SelfAttention(qk_norm="head", gate=SoftplusGate()), mlp=LAGUNA, n_kv_heads=2
    ),
}
DELTA = GatedDeltaNet(4, 4, 16, 16, decay="element", gate="sigmoid", rank=16, norm_eps=1e-5)
KIMI = LatentAttention(d_latent=32, d_nope=8, d_rope=16, d_value=12, norm_eps=1e-5)
COMPUTED |= {
    "mistral4": small(
        attention=replace(KIMI, d_query_latent=24, query_scale=LogScale(0.1, 8), scale=yarn_magnitude(4, 0.7) ** 2 / 5),
        position=Rotary(500.0, scaling=YaRNScaling(4.0, 8, attention_factor=1.2)),
        mlp=Experts(6, 3, 32, d_shared=32),
    ),
    "minicpm3": small(
        attention=replace(KIMI, d_query_latent=24),
        position=Rotary(500.0, scaling=LongRoPEScaling((1.0,) * 8, (2.0,) * 8, 8, 1.2)),
        block=PreNorm(1.4 / 2**0.5),
        embed_scale=12.0,
        logit_scale=8.0,
        tied=True,
    ),
    "kimi-linear": small(
        attention=(DELTA, KIMI, DELTA),
        position=NoPosition(),
        mlp=(Gated(), *[Experts(6, 3, 32, SigmoidRouting(scale=2.5), d_shared=32)] * 2),
        n_layers=3,
        norm=RMSNorm(1e-5),
    ),
}
INDEXED = replace(KIMI, d_query_latent=24, indexer=Indexer(4, 16, 64))  # with fewer heads, more scores are tied at 0
SHARED = replace(INDEXED, indexer=SharedIndexer())
COMPUTED |= {
    "deepseek32": small(
        attention=INDEXED, mlp=(Gated(), Experts(8, 2, 32, SigmoidRouting(True, 2.5, 4, 2), d_shared=32))
    ),
    "deepseek32: YaRN, dense": small(
        attention=replace(INDEXED, scale=yarn_magnitude(4.0, 0.7) ** 2 * 24**-0.5),
        position=Rotary(500.0, scaling=YaRNScaling(4.0, 8, attention_factor=1.0)),
        tied=True,
    ),
    "glm-dsa": small(
        attention=(INDEXED, SHARED, INDEXED, SHARED),
        mlp=(Gated(), *[Experts(6, 3, 32, SigmoidRouting(True, 2.5), d_shared=32)] * 3),
        n_layers=4,
    ),
}
STEP = SelfAttention(qk_norm="head", gate=SigmoidGate("head"), n_heads=4, n_kv_heads=2)
CLAMPED = LimitedExperts(6, 3, 32, SigmoidRouting(scale=2.5), d_shared=48, limit=0.05, shared_limit=0.04)
MUSE = SelfAttention(scale=0.7, qk_norm="head", qk_norm_part=RMSNorm(1e-5, weight=False), gate=SigmoidGate())


def altup(n_layers: int, window: int = 8) -> DecoderConfig:
    """Gemma 3n with every fifth layer without a window, and with the sizes that are fixed in llama.cpp."""
    part = SelfAttention(scale=1.0, qk_norm="head")
    own, local = replace(part, value_norm=RMSNorm(1e-6, weight=False)), [i % 5 < 4 for i in range(n_layers)]
    kinds = [own if i < 20 else replace(part, shares_kv=True) for i in range(n_layers)]
    block, last = AltUpBlock(vocab_size=37), n_layers - 1
    return small(
        attention=tuple(replace(kind, window=window * one) for kind, one in zip(kinds, local)),
        position=tuple(Rotary(100.0) if one else Rotary(500.0, scaling=LinearScaling(2.0)) for one in local),
        norm=RMSNorm(1e-6),
        mlp=tuple(
            SparseGated("gelu_tanh", sparsity=sparsity(64)) if i < 10 else Gated("gelu_tanh") for i in range(n_layers)
        ),
        block=tuple(replace(block, splits=i == 0, merges=i == last) for i in range(n_layers)),
        embed_scale=32**0.5,
        logit_softcap=30.0,
        n_layers=n_layers,
        n_kv_heads=2,
        tied=True,
    )


COMPUTED |= {
    "step35": small(
        attention=tuple(replace(STEP, window=8 * one, n_heads=4 + 2 * one) for one in LOCAL),
        position=tuple(
            Rotary(100.0) if one else Rotary(500.0, 0.5, scaling=Llama3Scaling(4.0, 1.0, 4.0, 16)) for one in LOCAL
        ),
        mlp=(LimitedGated(limit=0.03), Gated(), replace(CLAMPED, limit=0.0), CLAMPED),
        norm=RMSNorm(1e-5, 1.0),
        n_layers=4,
        n_kv_heads=2,
        d_head=16,
    ),
    "step35: dense, tied, all windows": small(
        attention=replace(STEP, gate=None, window=8), norm=RMSNorm(1e-5, 1.0), tied=True, n_kv_heads=2
    ),
    "muse-glimmer": small(
        attention=tuple(replace(MUSE, window=8 * one) for one in LOCAL),
        position=tuple(Rotary(500.0) if one else NoPosition() for one in LOCAL),
        norm=RMSNorm(1e-5, 1.0),
        final_norm=RMSNorm(1e-5),
        embed_norm=RMSNorm(1e-5, weight=False),
        block=MuseBlock(),
        logit_scale=0.2,
        logit_softcap=2.0,
        n_layers=4,
        n_kv_heads=2,
        d_head=16,
    ),
    "gemma3n": altup(22),
    "gemma3n: few layers": altup(4),
}
FOLDED = small(  # a Falcon-H1 whose scaling factors are folded into the file's weights
    attention=AttentionAndMamba2(
        SelfAttention(scale=0.1, value_scale=0.8), replace(MAMBA, scales=(0.5, 0.7, 1.2, 0.9, 0.8)), 0.6
    ),
    mlp=ScaledGated(gate_scale=0.7, scale=0.4),
    embed_scale=2.0,
    logit_scale=0.5,
    tied=True,
    n_kv_heads=2,
)
REFUSED = {
    "an epsilon of latents": (
        small(attention=replace(KIMI, norm_eps=1e-6)),
        "attention.norm_eps (1e-06 here, 1e-05 there): keep the model as a folder, or accept the difference with --acc",
    ),
    "Gemma 3n, a rank": (
        replace(altup(4), block=tuple(replace(cast(Any, block), rank=8) for block in altup(4).block)),
        "gemma3n differs in block.rank (8 here, 64 there)",
    ),
    "Gemma 3n, sparse units": (
        replace(altup(12), mlp=(SparseGated("gelu_tanh"),) * 10 + (Gated("gelu_tanh"),) * 2),
        "gemma3n differs in mlp.sparsity (0.95 here, 0.951",
    ),
    "an indexer's width": (
        small(attention=replace(KIMI, d_query_latent=24, indexer=Indexer(4, 16, 96))),
        "deepseek32 differs in attention.indexer.d_head (96 here, 128 there)",
    ),
}
