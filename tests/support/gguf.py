"""Small decoders for architectures of llama.cpp, and decoders that no architecture supports."""

from dataclasses import replace
from typing import Any

from onward import (
    Alibi,
    Attention,
    AttentionOnly,
    BranchNorm,
    DecoderConfig,
    DynamicScaling,
    Experts,
    FeedForwardOnly,
    Gated,
    GatedDeltaNet,
    LatentAttention,
    LayerNorm,
    Learned,
    LinearScaling,
    Llama3Scaling,
    LogScale,
    LongRoPEScaling,
    Mamba2,
    NoAttention,
    NoPosition,
    Parallel,
    Plain,
    PreNorm,
    ProportionalScaling,
    RMSNorm,
    Rotary,
    Sandwich,
    SelfAttention,
    SharedNorm,
    ShortConvolution,
    SigmoidGate,
    SigmoidRouting,
    SoftmaxRouting,
    YaRNScaling,
)
from onward.config.scaling import yarn_magnitude
from onward.families.gemma4_text import Gemma4Block, StreamExperts, StreamRouting
from onward.families.gpt_oss import ClampedExperts

from support import gguf_layered

LENGTH = 40  # length of the compared sequences: longer than windows, original contexts and prompt chunks
BIASED = SelfAttention(bias=True, out_bias=True)
GPT2 = {"position": Learned(), "norm": LayerNorm(), "mlp": Plain("gelu_tanh", True), "attention": BIASED}
GEMMA = {"norm": RMSNorm(1e-6, 1.0), "mlp": Gated("gelu_tanh"), "embed_scale": 32**0.5, "tied": True, "d_head": 16}
NEOX = GPT2 | {"position": Rotary(fraction=0.5)}
FALCON = {"norm": LayerNorm(), "mlp": Plain("gelu_tanh")}
LOCAL = SelfAttention(window=8, attn_softcap=20.0)
NORMED = SelfAttention(qk_norm="head")
LATENT = LatentAttention(d_latent=32, d_nope=8, d_rope=16, d_value=12, norm_eps=1e-5)


def small(**changes: Any) -> DecoderConfig:
    sizes = {"vocab_size": 37, "d_model": 32, "n_layers": 2, "n_heads": 4, "d_ff": 64, "context_length": LENGTH}
    return DecoderConfig(**{**sizes, **changes})


def scaled(scaling: Any) -> DecoderConfig:
    return small(position=Rotary(500.0, scaling=scaling))


UNWEIGHTED = LayerNorm(bias=False, weight=False)
ROUTED = Gated(), Experts(8, 2, 32, SigmoidRouting(True, 2.5), d_shared=32)


def alternating(part: SelfAttention, n_layers: int) -> dict[str, Any]:
    """Options with windows and rotary positions in three of four layers."""
    local = [(layer + 1) % 4 > 0 for layer in range(n_layers)]
    return {
        "attention": tuple(replace(part, window=8 * one) for one in local),
        "position": tuple(Rotary(500.0) if one else NoPosition() for one in local),
        "n_layers": n_layers,
    }


def mixed(recurrent: Attention, part: SelfAttention) -> tuple[Attention, ...]:
    return recurrent, part, recurrent, recurrent


MAMBA = Mamba2(4, 16, 2, 16)
DELTA = {
    "attention": mixed(
        GatedDeltaNet(2, 4, 16, 16),
        SelfAttention(qk_norm="head", gate=SigmoidGate()),
    ),
    "position": Rotary(fraction=0.5),
    "norm": RMSNorm(1e-6, 1.0),
    "n_kv_heads": 2,
    "n_layers": 4,
}


def gemma4(shared: int, same: bool) -> tuple[SelfAttention, ...]:
    """The attention layers of a Gemma 4; the last `shared` layers share keys and values; with `same`, layers without a
    window use keys as values."""
    part = SelfAttention(window=8, qk_norm="head", scale=1.0, value_norm=RMSNorm(1e-6, weight=False))
    layers = [part, replace(part, window=0, d_head=16, values_are_keys=same)] * 2
    shares = lambda one: replace(one, shares_kv=True, value_norm=None)
    return tuple(shares(one) if i >= len(layers) - shared else one for i, one in enumerate(layers))


GEMMA4 = {
    "attention": gemma4(0, False),
    "position": (Rotary(100.0), Rotary(500.0, scaling=ProportionalScaling(0.25))) * 2,
    "norm": RMSNorm(1e-6),
    "mlp": Gated("gelu_tanh"),
    "block": Gemma4Block(),
    "embed_scale": 32**0.5,
    "tied": True,
    "n_layers": 4,
}
ALTERNATING = alternating(SelfAttention(), 5)
COMPUTED = {  # by architecture; special cases have a name after a colon
    "llama": small(n_kv_heads=2),
    "llama: biases, tied, wide heads": small(attention=BIASED, mlp=Gated(bias=True), tied=True, d_head=16),
    "llama: Llama 3": scaled(Llama3Scaling(4.0, 1.0, 4.0, 16)),
    "llama: linear": scaled(LinearScaling(3.0)),
    "llama: YaRN": scaled(YaRNScaling(4.0, 8)),
    "llama: YaRN, other magnitude": scaled(YaRNScaling(4.0, 8, attention_factor=0.9)),
    "llama: LongRoPE": scaled(LongRoPEScaling((1.0, 1.1, 1.5, 2.0), (1.0, 2.0, 3.0, 5.0), 8, 1.2)),
    "llama: experts": small(mlp=Experts(count=4, top_k=2)),
    "qwen2": small(attention=SelfAttention(bias=True), n_kv_heads=1, tied=True),
    "qwen3": small(attention=NORMED, n_kv_heads=2, d_head=16),
    "qwen2moe": small(
        attention=SelfAttention(bias=True),
        mlp=Experts(6, 3, 32, SoftmaxRouting(renormalize=False), d_shared=64, shared_gate=True),
        tied=True,
    ),
    "qwen3moe": small(attention=NORMED, mlp=Experts(6, 3, 32)),
    "gemma": small(**GEMMA, n_kv_heads=1),
    "gemma2": small(
        **GEMMA, attention=(LOCAL, SelfAttention(attn_softcap=20.0)), block=Sandwich(), logit_softcap=10.0, n_layers=3
    ),
    "gemma3": small(
        **GEMMA,
        attention=(*[SelfAttention(window=8, qk_norm="head")] * 2, NORMED),
        position=(*[Rotary(100.0)] * 2, Rotary(scaling=LinearScaling(8.0))),
        block=Sandwich(),
        n_layers=4,
    ),
    "gpt2": small(**GPT2, tied=True),
    "phi2": small(**NEOX, block=SharedNorm(), head_bias=True),
    "phi3": small(n_kv_heads=2, tied=True),
    "phi3: LongRoPE, part of a head": small(
        position=Rotary(fraction=0.75, scaling=LongRoPEScaling((1.0, 1.1, 1.5), (1.0, 2.0, 3.0), 8, 1.2))
    ),
    "gptneox": small(**NEOX, block=Parallel()),
    "gptneox: one after the other": small(**NEOX, tied=True),
    "falcon": small(**FALCON, block=SharedNorm(), n_kv_heads=1, tied=True),
    "falcon: two norms": small(**FALCON, block=Parallel(), n_kv_heads=2),
    "bloom": small(**{**GPT2, "position": Alibi()}, embed_norm=LayerNorm(), tied=True),
    "mpt": small(
        norm=LayerNorm(bias=False),
        mlp=Plain("gelu_tanh"),
        position=Alibi(4.0),
        attention=SelfAttention(clip=0.5),
        tied=True,
    ),
    "starcoder2": small(**{**GPT2, "position": Rotary()}, n_kv_heads=2, tied=True),
    "stablelm": small(norm=LayerNorm(), position=Rotary(fraction=0.25), attention=SelfAttention(bias=True), d_model=64),
    "stablelm: norms of heads": small(
        norm=LayerNorm(),
        attention=SelfAttention(qk_norm="heads", qk_norm_part=LayerNorm(bias=False)),
        position=Rotary(fraction=0.5),
        block=SharedNorm(),
        n_kv_heads=2,
    ),
    "olmo2": small(attention=SelfAttention(qk_norm="width"), block=BranchNorm(), n_kv_heads=2, tied=True),
    "command-r": small(norm=LayerNorm(bias=False), block=SharedNorm(), logit_scale=0.25, tied=True, n_kv_heads=2),
    "granite": small(
        block=PreNorm(0.22), embed_scale=12.0, logit_scale=0.25, attention=SelfAttention(scale=0.1), d_head=16
    ),
    "deepseek2": small(
        attention=LATENT,
        mlp=(Gated(), *[Experts(4, 2, 32, SoftmaxRouting(False, 2.5), d_shared=64)] * 2),
        n_layers=3,
    ),
    "deepseek2: latent queries, YaRN": small(
        attention=replace(LATENT, d_query_latent=24, scale=yarn_magnitude(4.0, 0.7) ** 2 * 24**-0.5),
        position=Rotary(500.0, scaling=YaRNScaling(4.0, 8, attention_factor=1.0)),
        mlp=Experts(4, 2, 32, SoftmaxRouting(False), d_shared=32),
        tied=True,
    ),
    "deepseek2: V3": small(
        attention=replace(LATENT, d_query_latent=24),
        mlp=(Gated(), Experts(8, 2, 32, SigmoidRouting(True, 2.5, 4, 2), d_shared=32)),
    ),
    "gpt-oss": small(
        attention=(
            SelfAttention(8, bias=True, out_bias=True, sinks=True),
            SelfAttention(bias=True, out_bias=True, sinks=True),
        ),
        mlp=ClampedExperts(4, 2, router=SoftmaxRouting(bias=True), bias=True),
        position=Rotary(500.0, scaling=YaRNScaling(4.0, 8)),
        n_kv_heads=2,
        d_head=16,
    ),
    "smollm3": small(position=(*[Rotary(500.0)] * 3, NoPosition()), n_layers=5, n_kv_heads=2, tied=True),
}
COMPUTED |= {
    "llama: experts of another width": small(mlp=Experts(count=4, top_k=2, d_ff=32)),
    "olmo": small(norm=UNWEIGHTED, attention=SelfAttention(clip=0.5), n_kv_heads=2),
    "olmo2: windows": small(
        attention=(*[SelfAttention(8, qk_norm="width")] * 3, SelfAttention(qk_norm="width")),
        position=(*[Rotary(500.0)] * 3, Rotary(500.0, scaling=YaRNScaling(4.0, 8))),
        block=BranchNorm(),
        n_layers=5,
    ),
    "cohere2": small(
        norm=LayerNorm(bias=False), block=SharedNorm(), logit_scale=0.25, tied=True, **ALTERNATING, n_kv_heads=2
    ),
    "exaone4": small(attention=NORMED, block=BranchNorm(), n_kv_heads=2, tied=True),
    "exaone4: windows": small(
        **alternating(SelfAttention(qk_norm="head"), 64), block=BranchNorm(), d_model=16, d_ff=16, n_heads=2
    ),
    "glm4": small(attention=SelfAttention(bias=True), position=Rotary(fraction=0.5), block=Sandwich(), n_kv_heads=2),
    "chatglm": small(attention=SelfAttention(bias=True), position=Rotary(fraction=0.5), n_kv_heads=2, tied=True),
    "seed_oss": small(attention=SelfAttention(bias=True), n_kv_heads=2, d_head=16),
    "arcee": small(mlp=Plain("relu2"), n_kv_heads=2, position=Rotary(scaling=Llama3Scaling(4.0, 1.0, 4.0, 16))),
    "ernie4_5": small(n_kv_heads=2, tied=True, d_head=16),
    "starcoder": small(**GPT2, n_kv_heads=1, tied=True),
    "nemotron": small(norm=LayerNorm(offset=1.0), mlp=Plain("relu2"), position=Rotary(fraction=0.5), n_kv_heads=2),
    "jais2": small(norm=LayerNorm(), attention=BIASED, mlp=Plain("relu2", True), n_kv_heads=2),
    "glm4moe": small(
        attention=SelfAttention(bias=True, qk_norm="head"), position=Rotary(fraction=0.5), mlp=ROUTED, n_kv_heads=2
    ),
    "glm4moe: without q/k norm": small(mlp=ROUTED[1:], d_head=16),
    "dots1": small(attention=NORMED, mlp=ROUTED),
    "exaone-moe": small(**alternating(NORMED, 5), mlp=(*ROUTED, *ROUTED[1:] * 3), n_kv_heads=2),
    "hy_v3": small(attention=NORMED, mlp=ROUTED, n_kv_heads=2, tied=True),
    "minimax-m2": small(
        attention=SelfAttention(qk_norm="width"),
        position=Rotary(fraction=0.5),
        mlp=Experts(6, 3, 32, SigmoidRouting()),
        n_kv_heads=2,
    ),
    "olmoe": small(attention=SelfAttention(qk_norm="width"), mlp=Experts(6, 3, router=SoftmaxRouting(False))),
    "granitemoe": small(
        block=PreNorm(0.22),
        embed_scale=12.0,
        logit_scale=0.25,
        attention=SelfAttention(scale=0.1),
        mlp=Experts(6, 3, d_shared=32),
        tied=True,
    ),
    "ernie4_5-moe": small(
        mlp=(Gated(), Experts(6, 3, 32, SoftmaxRouting(selection_bias=True, min_sum=1e-12), d_shared=64)),
        n_kv_heads=2,
        tied=True,
    ),
    "hy_v3: softmax, not renormalized": small(
        attention=NORMED, mlp=Experts(6, 3, 32, SoftmaxRouting(renormalize=False), d_shared=32)
    ),
    "ernie4_5-moe: without bias": small(mlp=(Gated(), Experts())),
    "deepseek2: dense": small(attention=replace(LATENT, d_query_latent=24), tied=True),
    "afmoe": small(
        **alternating(SelfAttention(qk_norm="head", gate=SigmoidGate()), 5),
        mlp=(*ROUTED, *ROUTED[1:] * 3),
        block=Sandwich(),
        embed_scale=32**0.5,
        n_kv_heads=2,
    ),
    "mistral3": small(
        position=Rotary(500.0, scaling=YaRNScaling(4.0, 8, attention_factor=1.0, beta_fast=4.0)),
        attention=SelfAttention(query_scale=LogScale(0.1, 8)),
        n_kv_heads=2,
        d_head=16,
    ),
    "mistral3: without scaling": small(attention=SelfAttention(query_scale=LogScale(0.2, 8))),
    "hunyuan-dense": small(attention=SelfAttention(qk_norm="head", norm_rotated=True), n_kv_heads=2, tied=True),
    "lfm2": small(attention=mixed(ShortConvolution(), NORMED), n_kv_heads=2, n_layers=4, tied=True),
    "lfm2moe": small(
        attention=mixed(ShortConvolution(4), NORMED),
        n_kv_heads=2,
        n_layers=4,
        tied=True,
        mlp=(Gated(), *[Experts(6, 3, 32, SigmoidRouting(min_sum=1e-6))] * 3),
    ),
    "qwen3next": small(**DELTA, mlp=Experts(6, 3, 32, d_shared=32, shared_gate=True)),
    "qwen35": small(**DELTA, tied=True),
    "qwen35moe": small(**DELTA, mlp=Experts(6, 3, 32, d_shared=48, shared_gate=True)),
    "granitehybrid": small(
        attention=mixed(MAMBA, SelfAttention(scale=0.1)),
        position=NoPosition(),
        mlp=Gated(d_ff=96),
        n_layers=4,
        block=PreNorm(0.22),
        embed_scale=12.0,
        logit_scale=0.25,
        tied=True,
        n_kv_heads=2,
    ),
    "granitehybrid: experts, rotary": small(
        attention=mixed(MAMBA, SelfAttention()),
        mlp=Experts(6, 3, d_shared=32),
        n_layers=4,
    ),
    "nemotron_h": small(
        attention=(MAMBA, NoAttention(), SelfAttention(), NoAttention()),
        position=NoPosition(),
        mlp=Plain("relu2"),
        block=(AttentionOnly(), FeedForwardOnly(), AttentionOnly(), FeedForwardOnly()),
        n_layers=4,
        n_kv_heads=2,
        d_head=16,
    ),
    "gemma4": small(**GEMMA4, d_head=8),
    "gemma4: keys as values, cap, experts": small(
        **GEMMA4
        | {
            "attention": gemma4(0, True),
            "mlp": StreamExperts(6, 2, 32, d_shared=64, act="gelu_tanh", router=StreamRouting()),
        },
        logit_softcap=3.0,
        d_head=8,
    ),
    "gemma4: inputs of layers, shared keys": small(
        **{**GEMMA4, "attention": gemma4(2, False), "block": Gemma4Block(d_input=8, vocab_size=37)},
        d_head=8,
    ),
}
COMPUTED |= gguf_layered.COMPUTED
REFUSED = {
    "windows": (small(attention=SelfAttention(window=8)), "llama differs in attention.window (8 here, 0 there)"),
    "a least step": (
        replace(
            COMPUTED["nemotron_h"],
            attention=tuple(
                replace(part, step_min=0.001) if isinstance(part, Mamba2) else part
                for part in COMPUTED["nemotron_h"].attention
            ),
        ),
        "nemotron_h differs in attention.step_min (0.001 here, 0 there)",
    ),
    "an exact GELU": (small(**{**GPT2, "mlp": Plain("gelu", True)}), "gpt2 differs in mlp.act (gelu here, gelu_tanh"),
    "another activation": (small(mlp=Gated("relu")), "llama differs in mlp.act (relu here, silu there)"),
    "dynamic scaling": (scaled(DynamicScaling(2.0, 16)), "position.scaling"),
    "YaRN's ramp": (
        small(position=Rotary(scaling=YaRNScaling(4.0, 8, beta_fast=4.0)), attention=NORMED),
        "position.scaling.beta_fast (4 here, 32 there)",
    ),
    "YaRN's ramp, GPT-OSS": (
        small(
            attention=SelfAttention(8, bias=True, out_bias=True, sinks=True),
            mlp=ClampedExperts(4, 2, router=SoftmaxRouting(bias=True), bias=True),
            position=Rotary(500.0, scaling=YaRNScaling(4.0, 8, truncate=False)),
        ),
        "gpt-oss differs in position.scaling.truncate (no here, yes there)",
    ),
    "DeepSeek V2, groups of experts": (
        small(attention=LATENT, mlp=Experts(4, 2, 32, SoftmaxRouting(False, 1.0, 2, 1), d_shared=32)),
        "deepseek2 differs in mlp.router.n_groups (2 here, 1 there)",
    ),
    "DeepSeek V2, YaRN without a scale": (
        small(
            attention=LATENT,
            mlp=Experts(4, 2, 32, SoftmaxRouting(False), d_shared=32),
            position=Rotary(500.0, scaling=YaRNScaling(4.0, 8)),
        ),
        "deepseek2 differs in attention.scale (none here",
    ),
    "DeepSeek V2, the layers of the lite one": (
        small(
            attention=replace(LATENT, d_query_latent=24),
            mlp=Experts(4, 2, 32, SoftmaxRouting(False), d_shared=32),
            n_layers=26,
        ),
        "deepseek2 differs in attention.d_query_latent (24 here, 0 there)",
    ),
    "part of a head": (small(position=Rotary(fraction=0.5), attention=NORMED), "position.fraction (0.5 here, 1 there)"),
    "Gemma's scale": (small(**{**GEMMA, "embed_scale": 2.0}), "gemma differs in embed_scale (2 here, 5.65685 there)"),
    "Gemma, untied": (small(**{**GEMMA, "tied": False}), "gemma differs in tied (no here, yes there)"),
    "a bias behind attention": (
        small(attention=SelfAttention(qk_norm="head", out_bias=True), d_head=16),
        "attention.",
    ),
    "experts not renormalized": (
        small(attention=NORMED, mlp=Experts(6, 3, 32, SoftmaxRouting(renormalize=False))),
        "qwen3moe differs in mlp.router.renormalize (no here, yes there)",
    ),
    "a dense layer behind experts": (small(mlp=(Experts(), Gated())), "mlp (gated here, experts there)"),
    "ALiBi": (small(position=Alibi()), "position (alibi here, rotary there)"),
    "norms of all heads together": (small(attention=SelfAttention(qk_norm="width")), "attention.qk_norm (width here"),
    "wide heads": (small(**GPT2, d_head=16), "gpt2 differs in d_head (16 here, 8 there)"),
    "rotary in other layers": (small(position=(NoPosition(), Rotary())), "position (none here, rotary there)"),
    "a final norm of its own": (small(final_norm=LayerNorm()), "final_norm"),
    "a bias of the head": (small(head_bias=True, attention=NORMED), "qk_norm (head here, none there)"),
}
REFUSED |= gguf_layered.REFUSED
