"""Agreement with TransformerLens 2 on a small GPT-2, if the library is installed."""

from typing import Any

import pytest
import torch
from torch import Tensor

import onward
from onward.inspection import logit_attribution, logit_lens

from support.decoders import DECODERS, assert_close, decoder

lens = pytest.importorskip("transformer_lens", reason="pip install 'transformer-lens<3' to compare with it")
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
NAMES = {  # TransformerLens's name: Onward's name in each block
    "hook_resid_pre": "in",
    "hook_resid_mid": "mid",
    "hook_resid_post": "out",
    "attn.hook_q": "attn.q",
    "attn.hook_k": "attn.k",
    "attn.hook_v": "attn.v",
    "attn.hook_pattern": "attn.weights",
    "attn.hook_z": "attn.heads",
    "hook_attn_out": "attn.out",
    "mlp.hook_pre": "mlp.pre",
    "mlp.hook_post": "mlp.post",
    "hook_mlp_out": "mlp.out",
    "ln1.hook_scale": "attn_norm.scale",
    "ln2.hook_scale": "mlp_norm.scale",
}


def theirs_of(model: onward.Decoder) -> Any:
    """A HookedTransformer with the same weights."""
    c = model.config
    config = lens.HookedTransformerConfig(
        n_layers=c.n_layers,
        d_model=c.d_model,
        n_ctx=c.context_length,
        d_head=c.d_head,
        n_heads=c.n_heads,
        d_mlp=c.d_ff,
        d_vocab=c.vocab_size,
        act_fn="gelu_new",
        normalization_type="LN",
        device="cpu",
        seed=0,
    )
    hooked = lens.HookedTransformer(config)
    ours = model.state_dict()
    state: dict[str, Tensor] = {
        "embed.W_E": ours["embed.weight"],
        "pos_embed.W_pos": ours["position.weight"],
        "ln_final.w": ours["norm.weight"],
        "ln_final.b": ours["norm.bias"],
        "unembed.W_U": ours["head.weight"].T,
        "unembed.b_U": torch.zeros(c.vocab_size),
    }
    for layer in range(c.n_layers):
        b = f"blocks.{layer}."
        for norm, name in ("ln1", "attn_norm"), ("ln2", "mlp_norm"):
            state |= {f"{b}{norm}.w": ours[f"{b}{name}.weight"], f"{b}{norm}.b": ours[f"{b}{name}.bias"]}
        for q in "qkv":
            state[f"{b}attn.W_{q.upper()}"] = ours[f"{b}attn.{q}.weight"].unflatten(0, (c.n_heads, -1)).mT
            state[f"{b}attn.b_{q.upper()}"] = ours[f"{b}attn.{q}.bias"].unflatten(0, (c.n_heads, -1))
        state[f"{b}attn.W_O"] = ours[f"{b}attn.out.weight"].T.unflatten(0, (c.n_heads, -1))
        state[f"{b}attn.b_O"] = ours[f"{b}attn.out.bias"]
        for w, name in ("in", "up"), ("out", "down"):
            state |= {
                f"{b}mlp.W_{w}": ours[f"{b}mlp.{name}.weight"].T,
                f"{b}mlp.b_{w}": ours[f"{b}mlp.{name}.bias"],
            }
    missing = hooked.load_state_dict(state, strict=False)
    assert all(name.endswith(("mask", "IGNORE")) for name in missing.missing_keys)
    return hooked


@torch.no_grad()
def test_activations_lens_and_attribution_agree() -> None:
    model = decoder(DECODERS["gpt2"])
    hooked, ids = theirs_of(model), torch.tensor([TOKENS])
    logits, cache = hooked.run_with_cache(ids)
    with onward.trace(model) as t:
        assert_close(model(ids), logits, 1e-4)
    for layer in range(model.config.n_layers):
        for theirs, ours in NAMES.items():
            assert_close(t[f"blocks.{layer}.{ours}"], cache[f"blocks.{layer}.{theirs}"], 1e-4)
        seen = torch.ones(8, 8).tril().bool()  # TransformerLens masks scores with a large negative number
        scores, wanted = t[f"blocks.{layer}.attn.masked_scores"], cache[f"blocks.{layer}.attn.hook_attn_scores"]
        assert_close(scores[..., seen], wanted[..., seen], 1e-4)
    streams, _ = cache.accumulated_resid(layer=-1, apply_ln=False, return_labels=True)
    found = logit_lens(model, TOKENS, top=13)
    assert len(streams) == len(found.names)
    for layer, stream in enumerate(streams):
        wanted = hooked.unembed(hooked.ln_final(stream))[0].softmax(-1)
        assert_close(found.probabilities[layer], wanted.gather(1, found.ids[layer]), 1e-4)
    parts = logit_attribution(model, TOKENS, -1, target=5)
    direction = hooked.W_U[:, 5]
    heads = cache.stack_head_results(layer=-1, pos_slice=-1)
    # divides by the norm's scale, without multiplying by its weight
    scaled = cache.apply_ln_to_stack(heads, layer=-1, pos_slice=-1)
    wanted = (scaled[:, 0] * hooked.ln_final.w) @ direction
    assert_close(parts.heads.flatten(), wanted, 1e-4)
