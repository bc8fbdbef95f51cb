"""PaLM (Chowdhery et al. 2022): GPT-3 with a parallel block, SwiGLU, rotary positions, one key/value head, no biases.

Neither weights nor a config were published, and transformers has no such class: these are presets to train and to
compare with. In the paper, a head is 256 wide regardless of n_heads, so the queries of the 540B model are 48 * 256 =
12,288 wide, which is not d_model. The width of each of SwiGLU's three matrices, d_ff, is 4 d_model. With V the
vocabulary size, D d_model, H the number of heads and L the number of layers

    V D + L (2 * 256 H D + 2 * 256 D + 12 D D + D) + D

parameters: 8,632,012,800, 62,495,662,080 and 540,356,474,880. The paper leaves open whether the branches of a block
share a norm and whether there is a norm before the head. Both are assumed here, as in GPT-J; norms have a weight and no
bias. It also leaves open the base of the rotary angles and the epsilon of the norms. Its embeddings are drawn with
standard deviation 1 and its logits divided by sqrt(d_model); here embeddings are multiplied by sqrt(d_model) instead,
as in Gemma, which is the same decoder with weights of the usual size.
"""

from onward.config.decoder import DecoderConfig, Gated, LayerNorm, Rotary, SharedNorm
from onward.families import HF

ARCHITECTURES: dict[str, str] = {}
SOURCE = "arXiv:2204.02311"
PRESETS: dict[str, HF | DecoderConfig] = {
    name: DecoderConfig(
        vocab_size=256_000,
        d_model=width,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=1,
        d_head=256,
        d_ff=4 * width,
        context_length=2048,
        position=Rotary(),
        mlp=Gated(act="silu"),
        norm=LayerNorm(bias=False),
        block=SharedNorm(),
        tied=True,
        embed_scale=width**0.5,
    )
    for name, width, layers, heads in (
        ("palm-8b", 4096, 32, 16),
        ("palm-62b", 8192, 64, 32),
        ("palm-540b", 18_432, 118, 48),
    )
}
ANCESTORS = {"palm": "gpt3-175b"}
