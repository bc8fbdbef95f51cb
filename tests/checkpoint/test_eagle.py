"""EAGLE-3 drafts, as three programs write them, draft what a formula with parts of transformers computes, and change no
token; forms that Onward does not compute are refused by name."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb, repeat_kv

import onward
from onward import BlockManager, PagedKVCache, Request, Sampling, UserError
from onward.checkpoint.draft_heads import ForeignDraft, is_draft
from onward.checkpoint.eagle import load_eagle
from onward.checkpoint.weights import stored_tensors
from onward.cli import main
from onward.generation.drafts.eagle_draft import EagleDraft
from onward.generation.drafts.estimates import Estimates
from onward.model.state_embedding import StateEmbedding

from support.parity import publish
from support.recorded_drafts import Recorded

V, U, D, N = 60, 40, 32, 5  # tokens of the model and of the draft, width, blocks of the model
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5}
SIZES = {"hidden_size": D, "intermediate_size": 48, "vocab_size": V, **HEADS}
LAYER = {**SIZES, "model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu", "max_position_embeddings": 64}
PLAIN = {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": U, **LAYER}
SGLANG = {**PLAIN, "architectures": ["LlamaForCausalLMEagle3"]}
APART: dict[str, Any] = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": U,
    "norm_before_residual": False,
    "transformer_layer_config": LAYER,
}
IDS = "eagle_aux_hidden_state_layer_ids"
QWEN = {**LAYER, "model_type": "qwen3", "attention_bias": False, "rope_theta": 1e6}
SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 16}
OF_MODEL: dict[str, Any] = {"model_type": "phi3", "sliding_window": 4, "max_window_layers": 2}
OF_MODEL |= {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "target_model_type": "qwen2_5_vl"}
NVIDIA: dict[str, Any] = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
}
NVIDIA |= {"use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1}
NVIDIA |= {"parallel_draft_heads_num_layers": 1}
# config.json, the blocks whose inputs are read, and the tensors that the files lack
FORMS: dict[str, tuple[dict[str, Any], Sequence[int], str]] = {
    "the authors'": (PLAIN, [2, 3, 4], "embed_tokens"),
    "the authors', all tokens": ({**PLAIN, "draft_vocab_size": V}, [2, 3, 4], "embed_tokens d2t"),
    "SGLang's": ({**SGLANG, "eagle_config": {IDS: [0, 1, 3], "use_aux_hidden_state": True}}, [1, 2, 4], "embed_tokens"),
    "SGLang's, norms apart": (
        {**SGLANG, "fc_norm": None, "use_aux_norm": True, "eagle_config": {IDS: [0, 1, 3]}},
        [1, 2, 4],
        "",
    ),
    "SGLang's, the model's head": (
        {**SGLANG, "eagle_config": {IDS: [0, 1, 3]}, "draft_vocab_size": None},
        [1, 2, 4],
        "embed_tokens lm_head d2t",
    ),
    "SGLang's, keys of the model": ({**SGLANG, **OF_MODEL, "eagle_config": {IDS: [0, 1, 3]}}, [1, 2, 4], ""),
    "NVIDIA's": ({**SGLANG, "num_eagle_features": 3, "eagle_config": {**NVIDIA, IDS: [0, 1, 3]}}, [1, 2, 4], ""),
    "speculators'": ({**APART, IDS: [1, 3, 4]}, [1, 3, 4], "embed_tokens"),
    "speculators', the last block": ({**APART, IDS: [4, 0, N], "norm_before_residual": True}, [0, 4, N], ""),
    "speculators', one norm": (
        {**APART, IDS: [0, 2], "norm_before_fc": True, "transformer_layer_config": {**LAYER, "rope_scaling": SCALED}},
        [0, 2],
        "embed_tokens",
    ),
    "speculators', Qwen 3": (
        {**APART, IDS: [1, 2, 3, 4], "transformer_layer_config": QWEN, "fc_norm": True, "norm_output": True},
        [1, 2, 3, 4],
        "",
    ),
}


def model_of(folder: Path, n: int = N) -> Any:
    layers = {"num_hidden_layers": n, "max_position_embeddings": 64, "tie_word_embeddings": False}
    return publish(LlamaConfig(**SIZES, **layers), folder)


def tensors_of(hf: dict[str, Any], layers: int, lacks: str) -> dict[str, Tensor]:
    """The tensors of a draft, by the names of the newest format."""
    c = hf.get("transformer_layer_config", hf)
    width, q, k = c["hidden_size"], c["num_attention_heads"] * 8, c["num_key_value_heads"] * 8
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (V, width),
        "fc.weight": (width, layers * D),
        "layers.0.self_attn.q_proj.weight": (q, 2 * width),
        "layers.0.self_attn.k_proj.weight": (k, 2 * width),
        "layers.0.self_attn.v_proj.weight": (k, 2 * width),
        "layers.0.self_attn.o_proj.weight": (width, q),
        "layers.0.mlp.gate_proj.weight": (48, width),
        "layers.0.mlp.up_proj.weight": (48, width),
        "layers.0.mlp.down_proj.weight": (width, 48),
        "lm_head.weight": (hf.get("draft_vocab_size") or V, width),
        "norm.weight": (width,),
        **{
            f"layers.0.{name}.weight": (width,)
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        },
    }
    if c["model_type"] == "qwen3":
        shapes |= {f"layers.0.self_attn.{name}_norm.weight": (8,) for name in "qk"}
    if hf.get("norm_before_fc"):
        shapes["input_norm.weight"] = (layers * D,)
    if hf.get("fc_norm") or hf.get("use_aux_norm"):
        shapes |= {f"fc_norm.{i}.weight": (D,) for i in range(layers)}
    torch.manual_seed(3)
    result = {n: torch.rand(s) + 0.5 if len(s) == 1 else torch.randn(s) / s[1] ** 0.5 for n, s in shapes.items()}
    result = {n: t * 3 if n.startswith("lm_head") else t for n, t in result.items()}
    chosen = torch.randperm(V)[:U].sort().values
    result["d2t"], result["t2d"] = chosen - torch.arange(U), torch.isin(torch.arange(V), chosen)
    return {n: t for n, t in result.items() if n.removesuffix(".weight") not in lacks.split()}


def write(folder: Path, hf: dict[str, Any], stored: dict[str, Tensor], older: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    names = {
        "layers.0.": "midlayer.",
        **{f"fc_norm.{i}": f"aux_norm_{n}" for i, n in enumerate(("low", "mid", "high"))},
    }
    for new, old in names.items() if older else ():
        stored = {name.replace(new, old): tensor for name, tensor in stored.items()}
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf))
    return folder


class Formula:
    """An EAGLE-3 draft without a cache, in plain PyTorch (Li et al. 2025, section 3; rotation from transformers)."""

    def __init__(self, theirs: Any, hf: dict[str, Any], layers: Sequence[int], w: dict[str, Tensor]) -> None:
        self.theirs, self.hf, self.layers, self.w = theirs, hf, layers, w
        self.c = hf.get("transformer_layer_config", hf)
        own = {
            key: self.c[key] for key in ("hidden_size", "head_dim", "num_attention_heads", "max_position_embeddings")
        }
        rope = {
            "rope_type": "default",
            **(self.c.get("rope_scaling") or {}),
            "rope_theta": self.c.get("rope_theta", 1e4),
        }
        self.rotary = LlamaRotaryEmbedding(LlamaConfig(**own, rope_parameters=rope))

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.w[f"{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, 1e-5)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w[f"layers.0.{name}_proj.weight"].T

    def states(self, tokens: Tensor) -> Tensor:
        found: dict[int, Tensor] = {}
        readers = [*self.theirs.model.layers, self.theirs.model.norm]
        keep: Callable[[int], Any] = lambda n: lambda _, given: found.__setitem__(n, given[0])
        hooks = [readers[n].register_forward_pre_hook(keep(n)) for n in self.layers]
        self.theirs(tokens)
        for hook in hooks:
            hook.remove()
        parts = [found[n] for n in self.layers]
        if self.hf.get("fc_norm") or self.hf.get("use_aux_norm"):
            parts = [self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)]
        x = torch.cat(parts, -1)
        return (self.norm(x, "input_norm") if self.hf.get("norm_before_fc") else x) @ self.w["fc.weight"].T

    def step(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (1, T, V) and next states (1, T, D) from tokens (1, T) and the states before them."""
        table = self.w.get("embed_tokens.weight", self.theirs.model.embed_tokens.weight)
        hidden = self.norm(states, "layers.0.hidden_norm")
        x = torch.cat([self.norm(table[tokens], "layers.0.input_layernorm"), hidden], -1)
        q, k, v = (self.linear(x, f"self_attn.{name}").unflatten(-1, (-1, 8)).transpose(1, 2) for name in "qkv")
        if self.c["model_type"] == "qwen3":
            q, k = self.norm(q, "layers.0.self_attn.q_norm"), self.norm(k, "layers.0.self_attn.k_norm")
        q, k = apply_rotary_pos_emb(q, k, *self.rotary(x, torch.arange(tokens.size(1))[None]))
        k, v = repeat_kv(k, 2), repeat_kv(v, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = (hidden if self.hf.get("norm_before_residual") else states) + self.linear(y, "self_attn.o")
        h = self.norm(x, "layers.0.post_attention_layernorm")
        x = x + self.linear(F.silu(self.linear(h, "mlp.gate")) * self.linear(h, "mlp.up"), "mlp.down")
        normed = self.norm(x, "norm")
        short = normed @ self.w.get("lm_head.weight", self.theirs.lm_head.weight).T
        logits = short.new_full((*short.shape[:-1], V), torch.finfo(torch.float32).min)
        logits[..., torch.arange(short.size(-1)) + self.w.get("d2t", torch.tensor(0))] = short
        return logits, normed if self.hf.get("norm_output") else x

    @torch.no_grad()
    def guesses(self, context: list[int], count: int, first: int = 0) -> list[int]:
        """The next `count` draft tokens, computed from the tokens from index `first` of the context on."""
        states, tokens = self.states(torch.tensor([context[:-1]]))[:, first:], context[first:]
        for _ in range(count):
            logits, new = self.step(torch.tensor([tokens[1:]]), states)
            tokens.append(int(logits[0, -1].argmax()))
            states = torch.cat([states, new[:, -1:]], 1)
        return tokens[len(context) - first :]


class RecordedEagle(Recorded, EagleDraft):
    """An EAGLE-3 draft that records its proposals."""


def run(lm: onward.LanguageModel, draft: EagleDraft | None, compile_after: int | None) -> list[list[int]]:
    engine = onward.Engine(lm.model, rows=2, draft=draft, compile_after=compile_after)
    options = Sampling(temperature=0), Sampling(temperature=0.7), Sampling(temperature=0)
    found = [engine.add(Request([7 + i, 3, 50, 9], s, 20, seed=i)) for i, s in enumerate(options)]
    engine.finish()
    steps = engine.runner.compiled
    assert (steps is None) == (compile_after is None)
    if steps:
        assert {1, 16} <= {width for ((_, width), *_), *_ in steps.pool.free}, "prompts are compiled, too"
    return [request.tokens for request in found]


@pytest.mark.parametrize("compile_after", [None, 0], ids=["plain", "compiled"])
@pytest.mark.parametrize("form", FORMS)
def test_drafts_are_those_of_the_formula_and_change_no_token(
    form: str, compile_after: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf, layers, lacks = FORMS[form]
    n = 7 if "authors" in form else N  # whose default are the inputs of the blocks 2, n / 2 and n - 3
    theirs, stored = model_of(tmp_path, n), tensors_of(hf, len(layers), lacks)
    folder = write(tmp_path / "draft", hf, stored, older="speculators" not in form)
    assert is_draft(folder)
    lm = onward.load(tmp_path, device="cpu")
    decoder = load_eagle(folder, lm.model)
    formula, tokens = Formula(theirs, hf, layers, stored), torch.randint(V, (1, 9))
    with torch.no_grad():
        assert isinstance(decoder.embed, StateEmbedding)
        states = formula.states(tokens[:, :-1])
        decoder.embed.note(states)
        torch.testing.assert_close(decoder(tokens[:, 1:]), formula.step(tokens[:, 1:], states)[0], atol=1e-4, rtol=1e-4)
    monkeypatch.setattr(Estimates, "gain", lambda self, requests: (2.0, 0.8))  # drafts save no time in a small model
    draft = RecordedEagle(lm.model, decoder)
    draft.compile_after = compile_after
    assert run(lm, draft, compile_after) == run(lm, None, compile_after)
    assert sum(len(tokens) for _, tokens in draft.noted) > 40
    for context, found in draft.noted[:: 1 if compile_after is None else 4]:
        if context[0] != 8:  # the second request samples
            assert found == formula.guesses(context, len(found))
    assert (draft.runner.compiled is None) == (compile_after is None)


def test_requests_without_hidden_states_are_drafted_for_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that had begun, or that was interrupted, may decode without prefill, since its prefix is cached."""
    monkeypatch.setattr(Estimates, "gain", lambda self, requests: (2.0, 0.8))
    hf, layers, lacks = FORMS["the authors'"]
    theirs, stored = model_of(tmp_path, 7), tensors_of(hf, len(layers), lacks)
    lm = onward.load(tmp_path, device="cpu")
    draft = RecordedEagle(lm.model, load_eagle(write(tmp_path / "draft", hf, stored), lm.model))
    pages = PagedKVCache(lm.model.config, 2, 64, 16, blocks=90, block_size=1)
    engine = onward.Engine(lm.model, cache=BlockManager(pages), draft=draft, compile_after=None)
    first, other = (engine.add(Request([7 + i, 3, 50, 9], Sampling(temperature=0), 20)) for i in range(2))
    for _ in range(6):
        engine.step()
    engine.scheduler.preempt()
    context = other.context
    engine.cancel(first)  # the other request continues in its row
    draft.noted.clear()
    engine.finish()
    assert draft.noted[0][0] == context  # it decodes without prefill
    formula = Formula(theirs, hf, layers, stored)
    for context, found in draft.noted:
        assert found == formula.guesses(context, len(found), draft.known[other].first)
    begun = engine.add(Request([8, 3, 50, 9], Sampling(temperature=0), 20, tokens=other.tokens[:5]))
    engine.finish()
    assert begun.tokens == other.tokens
    assert begun.num_drafted > 0


WRONG: dict[str, tuple[dict[str, Any], dict[str, Tensor], str]] = {
    "EAGLE-2": ({**LAYER, "architectures": ["EagleModel"]}, {}, "of the kind EagleModel and not EAGLE-3"),
    "P-EAGLE": (dict(APART, speculators_model_type="peagle"), {}, "of the kind peagle and not EAGLE-3"),
    "one hidden state": (dict(SGLANG, eagle_config={"use_aux_hidden_state": False}), {}, "use_aux_hidden_state False"),
    "a bias": (dict(SGLANG, bias=True), {}, "bias True: Onward supports only False"),
    "scaled logits": (dict(PLAIN, logit_scale=0.5), {}, "logit_scale 0.5: Onward supports only 1"),
    "an unknown switch": (dict(APART, embed_norm=True), {}, "the key embed_norm, which Onward does not know"),
    "an unknown nested switch": (dict(SGLANG, eagle_config={"x": 2}), {}, "the key x, which Onward does not know"),
    "no residual": ({k: v for k, v in APART.items() if k != "norm_before_residual"}, {}, "no norm_before_residual"),
    "another family": (dict(APART, transformer_layer_config=dict(LAYER, model_type="gpt_neox")), {}, "gpt_neox"),
    "blocks beyond": (dict(APART, **{IDS: [1, 2, 8]}), {}, r"blocks \[1, 2, 8\], but the model has 7"),
    "blocks twice": (dict(APART, **{IDS: [1, 1, 2]}), {}, r"blocks \[1, 1, 2\]"),
    "ids beyond": (APART, {"d2t": torch.full((U,), 30)}, "names tokens twice, or beyond the 60"),
    "ids twice": (APART, {"d2t": torch.full((U,), -1).cumsum(0)}, "names tokens twice, or beyond the 60"),
    "ids in a matrix": (APART, {"d2t": torch.zeros(1, U, dtype=torch.int64)}, "names tokens twice, or beyond the 60"),
    "a single number": (APART, {"fc.weight": torch.tensor(1.0)}, r"tensor fc.weight has shape \[\]"),
    "windows": (dict(SGLANG, sliding_window=4, layer_types=["sliding_attention"]), {}, "sliding_window 4"),
    "another model": (
        APART,
        {"fc.weight": torch.zeros(D, 3 * 48)},
        r"hidden states of 144 numbers, but those of the blocks \[2, 3, 4\] have 96",
    ),
    "another tensor": (APART, {"layers.1.hidden_norm.weight": torch.ones(D)}, "tensor layers.1.hidden_norm.weight"),
    "not finite": (APART, {"norm.weight": torch.full((D,), torch.nan)}, "norm.weight"),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_forms_are_refused_by_name(name: str, tmp_path: Path) -> None:
    hf, own, message = WRONG[name]
    model_of(tmp_path, 7)
    folder = write(tmp_path / "draft", hf, {**tensors_of(hf, 3, "embed_tokens"), **own})
    lm = onward.load(tmp_path, device="cpu")
    with pytest.raises(UserError, match=message):
        is_draft(folder) and load_eagle(folder, lm.model)


@pytest.fixture
def with_text(tmp_path: Path) -> Path:
    """A model with a tokenizer, beside the draft for it in the folder `draft`."""
    model_of(tmp_path)
    lm = onward.load(tmp_path, device="cpu")
    lm.tokenizer = onward.train_tokenizer("char", ["abcdefgh ijklmnop"])
    onward.save(lm, tmp_path / "model")
    hf, layers, lacks = FORMS["SGLang's"]
    write(tmp_path / "draft", hf, tensors_of(hf, len(layers), lacks))
    return tmp_path / "model"


def test_a_draft_in_the_folder_of_its_model_is_used(with_text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.api.folders.is_small", lambda config: False)
    (with_text.parent / "draft").rename(with_text / "draft")
    lm = onward.load(with_text, device="cpu")
    assert isinstance(lm.engine().draft, EagleDraft)
    assert lm.engine(lookup=0).draft is None
    hf = FORMS["SGLang's"][0]
    write(with_text / "draft", hf, tensors_of({**hf, "hidden_size": 48}, 3, ""))
    with pytest.warns(ForeignDraft, match=r"but the config asks for \[60, 32\] \(until then, it is not used\)"):
        assert onward.load(with_text, device="cpu").draft_head is None


def test_the_commands_take_its_folder(
    with_text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Estimates, "gain", lambda self, requests: (2.0, 0.8))
    words = [str(with_text), "abc", "--temperature", "0", "--max-new-tokens", "12", "--json", "--device", "cpu"]
    rows = []
    for more in [], ["--draft", str(with_text.parent / "draft")]:
        assert main(["generate", *words, *more]) == 0
        rows.append(json.loads(capsys.readouterr().out))
    assert rows[0]["tokens"] == rows[1]["tokens"]
    assert "num_drafted" not in rows[0]
    assert rows[1]["num_drafted"] > 0


def test_its_pickle_is_converted(with_text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The drafts of the authors of EAGLE-3 are pickles."""
    (old := with_text.parent / "old").mkdir()
    (old / "config.json").write_text(json.dumps(SGLANG))
    torch.save(tensors_of(SGLANG, 3, "embed_tokens"), old / "pytorch_model.bin")
    words = "convert", str(old), str(with_text.parent / "new"), "--from-bin"
    wrong = {
        f"onward convert {old} OUT --from-bin": ("generate", str(with_text), "abc", "--draft", str(old)),
        "--dtype does not apply to": (*words, "--dtype", "bf16"),
        "because it is an EAGLE-3 draft": (*words[:2], str(old / "new.gguf"), *words[3:]),
    }
    for message, command in wrong.items():
        assert main(command) == 2
        assert message in capsys.readouterr().err.replace("\n", " ")
    assert main(words) == 0
    assert "has the tensors of an EAGLE-3 draft" in capsys.readouterr().out
    assert stored_tensors(Path(words[2])).keys() == tensors_of(SGLANG, 3, "embed_tokens").keys()
