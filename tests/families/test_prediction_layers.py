"""Multi-token prediction layers with published names, used as drafts of their own model, equal a formula: norms of the
next token's embedding and of the hidden state, a projection of both, a block from transformers, a norm, and the model's
head."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import PretrainedConfig

import onward
from onward import UserError
from onward.checkpoint.names import LeftOut
from onward.checkpoint.prediction import load_prediction
from onward.generation.drafts.hidden_draft import HiddenDraft
from onward.model.state_embedding import StateEmbedding

from support.families import CASES
from support.parity import publish, tensors


def first(family: str) -> str:
    return next(name for name in CASES if name.startswith(f"{family}: "))


APART = "mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"
ONES = "model.layers.{n}", ".enorm", ".hnorm", ".eh_proj", ".shared_head.norm"
NAMES = {  # names of the block, and of the other modules
    "deepseek_v3: groups, a dense layer first": ONES,
    **{first(family): ONES for family in ("glm4_moe", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa")},
    **{first(family): APART for family in ("qwen3_next", "qwen3_5_text")},
}


def one_layer(hf: PretrainedConfig) -> PretrainedConfig:
    """A config for one layer like the last layer of `hf`."""
    one = copy.deepcopy(hf)
    for types in "layer_types", "mlp_layer_types":
        if getattr(one, types, None):
            setattr(one, types, getattr(one, types)[-1:])
    one.num_hidden_layers, one.first_k_dense_replace, one.tie_word_embeddings = 1, 0, False
    return one


def with_layer(name: str, folder: Path) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """Publish a model and its multi-token prediction layer. Returns the model, a model with only the block of that
    layer, and the layer's tensors outside the block."""
    hf, names = CASES[name], NAMES[name]
    block, *rest = [part.format(n=hf.num_hidden_layers) for part in names]
    embedding, hidden, projection, norm = (block + part if part[0] == "." else part for part in rest)
    (folder / "one").mkdir()
    theirs, one = publish(hf, folder), publish(one_layer(hf), folder / "one")
    stored, layer, d = tensors(folder), tensors(folder / "one"), hf.hidden_size
    torch.manual_seed(5)
    own = {f"{part}.weight": torch.rand(d) + 0.5 for part in (embedding, hidden)}
    own[f"{projection}.weight"] = torch.randn(d, 2 * d) / d**0.5
    stored |= {n.replace("model.layers.0", block): t for n, t in layer.items() if n.startswith("model.layers.0.")}
    stored |= own | {f"{norm}.weight": layer["model.norm.weight"].clone()}
    if block.startswith("model"):  # such files contain copies of the embedding and the head
        stored |= {f"{block}.embed_tokens.weight": stored["model.embed_tokens.weight"].clone()}
        stored |= {f"{block}.shared_head.head.weight": stored["lm_head.weight"].clone()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return theirs, one, own


@torch.no_grad()
def formula(theirs: Any, one: Any, own: dict[str, torch.Tensor], tokens: torch.Tensor, offset: float) -> torch.Tensor:
    """Logits for the token after each token of `tokens` (1, T) except the first."""
    e, h, projection = own.values()
    eps, d = theirs.config.rms_norm_eps, theirs.config.hidden_size
    embedded = F.rms_norm(theirs.model.embed_tokens(tokens[:, 1:]), (d,), e + offset, eps)
    hidden = F.rms_norm(theirs.model(tokens[:, :-1]).last_hidden_state, (d,), h + offset, eps)
    x = torch.cat([embedded, hidden], -1) @ projection.T
    return theirs.lm_head(one.model(inputs_embeds=x).last_hidden_state)


@pytest.mark.filterwarnings("ignore:Layers for multi-token prediction")
@pytest.mark.parametrize("name", NAMES)
def test_layer_is_the_formula_and_changes_no_token(name: str, tmp_path: Path) -> None:
    theirs, one, own = with_layer(name, tmp_path)
    lm = onward.load(tmp_path, device="cpu")
    draft = load_prediction(tmp_path, lm.model)
    tokens = torch.randint(lm.config.vocab_size, (1, 6))
    with torch.no_grad():
        assert isinstance(draft.embed, StateEmbedding)
        draft.embed.note(lm.model.hidden(tokens[:, :-1]))
        found = draft(tokens[:, 1:])
    wanted = formula(theirs, one, own, tokens, offset=1.0 if NAMES[name] is APART else 0.0)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    answers = []
    for chosen in None, HiddenDraft(draft, 3):
        engine = onward.Engine(lm.model, rows=1, draft=chosen)
        request = engine.add(onward.Request(tokens[0].tolist(), onward.Sampling(temperature=0.7), 10, seed=1))
        engine.finish()
        answers.append(request.tokens)
    assert answers[0] == answers[1]
    assert request.num_drafted > 0


def test_layer_that_computes_the_model_is_always_right(tmp_path: Path) -> None:
    """If no block adds to the residual stream, the next token depends only on the last token."""
    name = first("glm4_moe")
    with_layer(name, tmp_path)
    stored, d = tensors(tmp_path), CASES[name].hidden_size
    for n, tensor in stored.items():
        if n.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif n.endswith(("model.norm.weight", "shared_head.norm.weight", "enorm.weight")):
            tensor.fill_(1.0)
        elif n.endswith("eh_proj.weight"):
            tensor.copy_(torch.eye(d, 2 * d))
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(LeftOut):
        lm = onward.load(tmp_path, device="cpu")
    lm.tokenizer = onward.train_tokenizer("byte", [])
    engine = lm.engine(draft="mtp", rows=2)
    found = [engine.add(onward.Request([3 + i], onward.Sampling(temperature=1.0), 14)) for i in range(2)]
    engine.finish()
    assert all(request.num_drafted == request.num_accepted > 5 for request in found)


def test_model_without_such_a_layer_is_told(tmp_path: Path) -> None:
    publish(CASES["deepseek_v3: groups, a dense layer first"], tmp_path)
    lm = onward.load(tmp_path)
    with pytest.raises(UserError, match="has no layer for multi-token prediction: leave it out"):
        load_prediction(tmp_path, lm.model)
