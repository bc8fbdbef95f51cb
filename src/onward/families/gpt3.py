"""GPT-3 (Brown et al. 2020): GPT-2 in which every second layer attends to a window of recent tokens only.

Neither weights nor a config were published, and transformers has no such class: these are presets to train and to
compare with. Table 2.1 of the paper contradicts itself in two places and leaves some values open. Here

- a head is d_model / n_heads wide. The 1.3B model has 16 heads (as GPT-Neo's): with the table's 24 heads of 128, its
  queries would be 3,072 wide where d_model is 2,048.
- the 13B model is 5,140 wide, as in the table, and has 40 heads of 128, since 5,140 / 40 is not whole: its queries,
  keys and values are projections from 5,140 to 5,120, and its output projection is from 5,120 to 5,140.
- biases, GELU (its approximation by tanh), the vocabulary of 50,257 and the tied head, which counts once, are GPT-2's;
  the 2,048 positions are learned.
- layers alternate from the first on: dense, windowed, dense, ... A window is 256 tokens, the token itself included,
  as in GPT-Neo.

With V the vocabulary size, D d_model, A = n_heads * d_head (D, except in the 13B model) and L the number of layers

    V D + 2048 D + L (4 A D + 3 A + 8 D D + 10 D) + 2 D

parameters: 1,315,723,264 in the 1.3B, 12,936,488,380 in the 13B and 174,604,259,328 in the 175B model. Without windows
(`attention=self(bias=true, out_bias=true)`) all but the 13B model are GPT-2s and are saved as GPT-2; the heads of a
GPT-2 together have the width of the model.
"""

from onward.config.decoder import DecoderConfig, LayerNorm, Learned, Plain, SelfAttention
from onward.families import HF

ARCHITECTURES: dict[str, str] = {}
SOURCE = "arXiv:2005.14165"
DENSE = SelfAttention(bias=True, out_bias=True)
WINDOWED = SelfAttention(window=256, bias=True, out_bias=True)
PRESETS: dict[str, HF | DecoderConfig] = {
    name: DecoderConfig(
        vocab_size=50_257,
        d_model=width,
        n_layers=layers,
        n_heads=heads,
        d_head=width // heads,
        context_length=2048,
        position=Learned(),
        attention=(DENSE, WINDOWED),
        mlp=Plain(act="gelu_tanh", bias=True),
        norm=LayerNorm(),
        tied=True,
    )
    for name, width, layers, heads in (
        ("gpt3-125m", 768, 12, 12),
        ("gpt3-350m", 1024, 24, 16),
        ("gpt3-760m", 1536, 24, 16),
        ("gpt3-1.3b", 2048, 24, 16),
        ("gpt3-2.7b", 2560, 32, 32),
        ("gpt3-6.7b", 4096, 32, 32),
        ("gpt3-13b", 5140, 40, 40),
        ("gpt3-175b", 12_288, 96, 96),
    )
}
ANCESTORS = {"gpt3": "gpt2"}
