"""Mixtures of experts in published files, in both directions: the keys of a config.json that DeepSeek introduced, and
the names of tensors. Published files have one matrix per expert; Onward stacks the matrices of all experts in one
tensor."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from onward.base.errors import UserError
from onward.config.decoder import DecoderConfig, Experts, Gated, at
from onward.config.part_types import FeedForward
from onward.config.routing import Routing, SigmoidRouting, SoftmaxRouting
from onward.families import HF, Fix, Inexpressible, Row, linear, only, with_defaults

LLAMA = "gate_proj", "up_proj", "down_proj"
KEYS = {"count": "n_routed_experts", "top_k": "num_experts_per_tok", "d_ff": "moe_intermediate_size"}
ROUTER = "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group"
KINDS = "dense", "sparse"
FUSED = {"gate": ("gate_up_proj", "gate", "up"), "down": ("down_proj", "down")}  # (stack in the file, stacks in Onward)


def stack_module(matrices: list[str]) -> str:
    """Return the name of the module under which transformers 5 stores the stacked matrices of experts."""
    return matrices[0].partition(".experts.")[0].replace(".block_sparse_moe", ".mlp") + ".experts"


def experts(their: str, our: str, count: int, names: tuple[str, str, str] = LLAMA) -> Iterator[Row]:
    """Rows of the name mapping for a layer's experts; `names` are those of an expert's gate, up and down
    projections."""
    for name, stack in zip(names, ("gate", "up", "down")):
        yield [f"{their}.{expert}.{name}.weight" for expert in range(count)], f"{our}.{stack}"


FUSED_ROWS: Fix = (
    lambda t: t.unflatten(1, (2, -1)).transpose(0, 1).flatten(0, 1),
    lambda t: t.unflatten(0, (2, -1)).transpose(0, 1).flatten(1, 2),
)  # from (X, 2 F, D), the gate and up rows of each expert, to all gates followed by all up projections, and back


def mixture(hf: HF, router: Routing, plain: Gated, layers: int) -> tuple[FeedForward, ...]:
    """Return the feed-forward of each layer, as listed in mlp_layer_types; without this key, `plain` in the first
    first_k_dense_replace layers, then experts."""
    first = hf.get("first_k_dense_replace", 0)
    kinds = hf.get("mlp_layer_types") or [KINDS[layer >= first] for layer in range(layers)]
    if len(kinds) != layers or not {*kinds} <= {*KINDS}:
        raise UserError(f"config.json has mlp_layer_types {kinds}: Onward reads {KINDS}, one for each layer")
    routed: dict[str, Any] = {our: hf.get(their) for our, their in KEYS.items()}
    shared = hf.get("n_shared_experts")
    if KINDS[1] not in kinds:
        return (plain,) * layers
    if routed["top_k"] is None:
        raise UserError("config.json has no num_experts_per_tok, the number of experts per token: add it")
    many = Experts(**routed, d_shared=shared * routed["d_ff"], act=plain.act, router=router)
    return tuple(plain if kind == KINDS[0] else many for kind in kinds)


def sigmoid_mixture(hf: HF, plain: Gated, layers: int) -> tuple[FeedForward, ...]:
    """Like `mixture`, with DeepSeek-V3's router and the defaults that its keys have in most other families:
    renormalized routing weights, one group, a scale of 1, and one shared expert."""
    scores = hf.get("scoring_func")
    only(hf, scoring_func=scores if scores == "noaux_tc" else "sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    hf = with_defaults(hf, {"n_shared_experts": 1} | dict(zip(ROUTER, (True, 1.0, 1, 1))))
    return mixture(hf, SigmoidRouting(*(hf[key] for key in ROUTER)), plain, layers)


def mixture_keys(
    c: DecoderConfig, names: Mapping[str, str] = MappingProxyType({}), *, shared: bool = True
) -> dict[str, Any]:
    """The inverse of `mixture`. `names` maps a family's own keys to DeepSeek's; `shared`: whether
    transformers' class has a shared expert."""
    parts = [at(c.mlp, layer) for layer in range(c.n_layers)]
    none = Experts(d_ff=1, router=SoftmaxRouting(renormalize=False))
    many = next((part for part in parts if isinstance(part, Experts)), none)
    width = many.d_ff or c.d_ff
    if many != none and bool(many.d_shared) != shared:
        raise Inexpressible(f"transformers' class has {'a' if shared else 'no'} shared expert")
    keys = {their: getattr(many, our) for our, their in KEYS.items()} | {
        "moe_intermediate_size": width,
        "n_shared_experts": many.d_shared // width,
        "first_k_dense_replace": sum(part != many for part in parts),
        "n_group": many.router.n_groups,
        "topk_group": many.router.top_k_groups,
        "norm_topk_prob": many.router.renormalize,
        "routed_scaling_factor": many.router.scale,
    }
    own = {deepseek: own for own, deepseek in names.items()}
    return {own.get(key, key): value for key, value in keys.items()}


def dense_or_sparse(c: DecoderConfig) -> dict[str, Any]:
    """The key of a config.json that tells which layers have experts."""
    return {"mlp_layer_types": [KINDS[isinstance(at(c.mlp, i), Experts)] for i in range(c.n_layers)]}


def mixture_names(
    c: DecoderConfig,
    router: str = "gate",
    routing_bias: str = "gate.e_score_correction_bias",
    shared: str = "shared_experts",
) -> Iterator[Row]:
    """Rows for the layers with experts; the arguments are names that differ between families."""
    for i in range(c.n_layers):
        if isinstance(part := at(c.mlp, i), Experts):
            their, our = f"model.layers.{i}.mlp", f"blocks.{i}.mlp"
            yield from linear(f"{their}.{router}", f"{our}.router")
            yield f"{their}.{routing_bias}", f"{our}.router.routing_bias"
            yield from experts(f"{their}.experts", our, part.count)
            for name, projection in zip(("gate", "up", "down"), LLAMA):
                yield from linear(f"{their}.{shared}.{projection}", f"{our}.shared.{name}")
