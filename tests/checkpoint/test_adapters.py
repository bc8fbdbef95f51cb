"""Adapters as PEFT folders: the same logits in both directions, for families with different tensor names."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import onward
from onward import Decoder, LoRA, UserError, add_lora, merge_lora
from onward.checkpoint.huggingface.save import save_model
from onward.checkpoint.load import load_model
from onward.checkpoint.peft.adapters import load_adapter, save_adapter
from onward.checkpoint.peft.bases import BaseModel, check_base, weights_checksum
from onward.cli import main

from support.decoders import DECODERS, assert_close, decoder, token_ids
from support.families import CASES
from support.parity import publish

FAMILIES = "bloom", "cohere", "gpt2", "gpt_neox", "llama", "openai_gpt", "opt", "phi3"
PUBLISHED = {name: next(hf for hf in CASES.values() if hf.model_type.replace("-", "_") == name) for name in FAMILIES}
EXPERTS = {
    case.partition(":")[0]: CASES[case]
    for case in (
        "deepseek_v2: groups, a dense layer first, queries from x",
        "gpt_oss: as published",
        "mixtral: two of eight",
        "qwen2_moe: shared expert",
        "qwen3_moe: some layers dense, experts as wide",
    )
}
KINDS = {
    "LoRA": LoRA(rank=3, alpha=7.0, targets=("blocks",)),
    "rsLoRA, embedding and head": LoRA(rank=2, targets=("attn.q", "embed", "head"), rslora=True),
    "DoRA, a part of a fused tensor, a whole norm": LoRA(
        rank=3, targets=("attn.k", "attn.out"), dora=True, full=("norm",)
    ),
    "DoRA, embedding": LoRA(rank=2, targets=("embed", "attn.q"), dora=True),
    "LoRA, biases of adapted layers": LoRA(rank=2, targets=("attn.q", "mlp"), bias="lora_only"),
    "LoRA, all biases, tokens": LoRA(rank=2, targets=("attn.k",), bias="all", full=("norm",), tokens=(7, 3)),
    "rsLoRA, a part of fused stacks": LoRA(rank=2, targets=("mlp.gate", "attn.q"), rslora=True, dropout=0.1),
}
PAIRS = [
    (f, k) for i, f in enumerate(FAMILIES) for j, k in enumerate(KINDS) if j < 3 and ((i + j) % 3 == 0 or f == "gpt2")
]
PAIRS += (
    [("llama", "DoRA, embedding"), ("gpt2", "DoRA, embedding")]
    + [(f, "LoRA") for f in EXPERTS]
    + [(f, "LoRA, biases of adapted layers") for f in ("gpt2", "bloom", "opt", "qwen2_moe")]
    + [(f, "LoRA, all biases, tokens") for f in ("gpt2", "gpt_neox", "llama", "gpt_oss")]
    + [(f, "rsLoRA, a part of fused stacks") for f in ("gpt_oss", "qwen3_moe")]
)


def trained(folder: Path, lora: LoRA) -> tuple[Decoder, dict[str, Any]]:
    """A model with adapters that change its outputs, and its config.json."""
    model, hf = load_model(folder)
    torch.manual_seed(1)
    add_lora(model, lora)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model, hf


@pytest.mark.parametrize(("family", "kind"), PAIRS)
@torch.no_grad()
def test_an_adapter_has_the_logits_of_peft_whichever_of_the_two_wrote_it(
    family: str, kind: str, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft", reason="install peft to compare adapters with it")
    base, written = tmp_path / "base", tmp_path / "adapter"
    publish((PUBLISHED | EXPERTS)[family], base)
    ours, hf = trained(base, KINDS[kind])
    ours.eval()
    save_adapter(ours, written, hf, BaseModel(str(base), weights_checksum(base)))
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), written).eval()
    tokens = token_ids(ours.config)
    wanted = theirs(tokens).logits
    assert_close(ours(tokens), wanted)
    with theirs.disable_adapter():
        assert (theirs(tokens).logits - wanted).abs().max() > 0.01

    theirs.save_pretrained(tmp_path / "theirs")
    for folder in written, tmp_path / "theirs":
        back, _ = load_model(base)
        load_adapter(back, folder, hf)
        back.eval()
        assert_close(back(tokens), wanted)
        merge_lora(back)
        assert_close(back(tokens), wanted)
        assert not any("_lora." in name for name, _ in back.named_parameters())


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("gpt_oss", ["mlp.experts.gate_up_proj", "experts.down_proj"]),
        ("mixtral", ["gate_up_proj"]),
        ("qwen3_moe", ["model.layers.0.mlp.experts.gate_up_proj", "down_proj"]),
    ],
)
@torch.no_grad()
def test_target_parameters_of_peft_have_its_logits(family: str, targets: list[str], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="install peft to compare adapters with it")
    base = publish(EXPERTS[family], tmp_path / "base")
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=[], target_parameters=targets, rank_pattern={r".*\.gate_up_proj": 2}
    )
    theirs = peft.get_peft_model(base, config).eval()
    torch.manual_seed(1)
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    theirs.save_pretrained(tmp_path / "theirs")
    ours, hf = load_model(tmp_path / "base")
    plain = ours(token_ids(ours.config))
    load_adapter(ours, tmp_path / "theirs", hf)
    logits = ours(token_ids(ours.config))
    assert_close(logits, theirs(token_ids(ours.config)).logits)
    assert (logits - plain).abs().max() > 0.01


def per_expert(base: Path, folder: Path, ranks: tuple[int, int] = (2, 2), **keys: Any) -> Path:
    """Write an adapter for the layers of each expert of Mixtral, as before transformers 5; the ranks of the experts
    alternate between the two of `ranks`."""
    _, hf = load_model(base)
    tensors = {}
    torch.manual_seed(2)
    for layer in range(hf["num_hidden_layers"]):
        for expert in range(hf["num_local_experts"]):
            for name, shape in {"w1": (1, 0), "w2": (0, 1), "w3": (1, 0)}.items():
                sizes, rank = (hf["hidden_size"], hf["intermediate_size"]), ranks[expert % 2]
                module = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}"
                tensors[f"{module}.lora_A.weight"] = torch.randn(rank, sizes[shape[1]]) * 0.2
                tensors[f"{module}.lora_B.weight"] = torch.randn(sizes[shape[0]], rank) * 0.2
                if keys.get("use_dora"):
                    tensors[f"{module}.lora_magnitude_vector"] = torch.ones(sizes[shape[0]])
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["w1", "w2", "w3"],
    }
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config | keys))
    return folder


@torch.no_grad()
def test_an_adapter_of_each_experts_layers_has_the_logits_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="install peft to compare adapters with it")
    base = publish(EXPERTS["mixtral"], tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(base, per_expert(tmp_path / "base", tmp_path / "theirs")).eval()
    ours, hf = load_model(tmp_path / "base")
    load_adapter(ours, tmp_path / "theirs", hf)
    assert_close(ours(token_ids(ours.config)), theirs(token_ids(ours.config)).logits)


@torch.no_grad()
def test_an_adapter_of_experts_that_no_family_has_is_saved_and_loaded(tmp_path: Path) -> None:
    save_model(decoder(DECODERS["deepseek"]), tmp_path / "base", {})
    made, hf = trained(tmp_path / "base", LoRA(rank=2))
    save_adapter(made, tmp_path / "adapter", hf, BaseModel("base", ""))
    back, _ = load_model(tmp_path / "base")
    load_adapter(back, tmp_path / "adapter", hf)
    assert_close(back(token_ids(made.config)), made(token_ids(made.config)))


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "base"
    tokenizer = onward.train_tokenizer("char", ["abcdefgh "])
    torch.manual_seed(0)
    config = onward.DecoderConfig(vocab_size=tokenizer.vocab_size, d_model=32, n_layers=2, n_heads=2, context_length=32)
    onward.save(onward.LanguageModel(Decoder(config), tokenizer), folder)
    return folder


@pytest.fixture(scope="module")
def poems(lm: Path) -> Path:
    """An adapter for the model of the fixture `lm`."""
    model = onward.load(lm)
    model.model = trained(lm, LoRA(rank=2))[0]
    onward.save_adapter(model, lm.parent / "poems", lm)
    return lm.parent / "poems"


def test_an_adapter_loads_on_its_base_by_either_name(lm: Path, poems: Path) -> None:
    one, other, base = onward.load(poems), onward.load(lm, adapter_folder=poems), onward.load(lm)
    texts = [model.generate("abc", 8, temperature=0) for model in (one, other, base)]
    assert texts[0] == texts[1] != texts[2]
    with pytest.raises(UserError, match="with the adapter poems"):
        onward.save(one, lm.parent / "other")


def test_merge_is_rounded_once_and_loads_in_transformers(lm: Path, poems: Path, tmp_path: Path) -> None:
    assert main(["merge", str(poems), str(tmp_path / "merged"), "--dtype", "bfloat16"]) == 0
    merged, exact = load_model(tmp_path / "merged")[0], trained(lm, LoRA(rank=2))[0]
    merge_lora(exact)
    for (name, rounded), (_, wanted) in zip(merged.named_parameters(), exact.named_parameters()):
        assert torch.equal(rounded, wanted.bfloat16()), name
    AutoModelForCausalLM.from_pretrained(tmp_path / "merged")


def test_merge_never_writes_into_the_folder_of_its_base_or_adapter(lm: Path, poems: Path) -> None:
    for folder, part in (lm, "base"), (poems, "adapter"):
        before = sorted(poems.iterdir()) + sorted(lm.iterdir())
        with pytest.raises(UserError, match=f"the folder of its {part}: choose another out"):
            onward.merge(poems, folder)
        assert sorted(poems.iterdir()) + sorted(lm.iterdir()) == before


def test_commands_take_an_adapter(lm: Path, poems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["generate", str(lm), "abc", "--adapter", str(poems), "--temperature", "0", "--max-new-tokens", "8"]) == 0
    )
    assert capsys.readouterr().out.strip() == "abc" + onward.load(poems).generate("abc", 8, temperature=0).rstrip()


def changed(adapter: Path, folder: Path, **keys: Any) -> Path:
    """A copy of an adapter with changed keys in its adapter_config.json."""
    folder.mkdir()
    for file in adapter.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "adapter_config.json").read_text()) | keys
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_an_adapter_that_does_not_fit_is_one_sentence(lm: Path, poems: Path, tmp_path: Path) -> None:
    model, hf = load_model(lm)
    with torch.no_grad():
        model.head.weight += 1
    save_model(model, tmp_path / "other", hf)
    with pytest.raises(
        UserError, match=f"made for another base: .* {weights_checksum(lm)}, .* {weights_checksum(tmp_path / 'other')}"
    ):
        check_base(poems, tmp_path / "other")
    wrong = {
        "lora_bias True": changed(poems, tmp_path / "bias", lora_bias=True),
        "a LOHA adapter": changed(poems, tmp_path / "loha", peft_type="LOHA"),
        "no adapter_config.json": tmp_path / "other",
    }
    for message, folder in wrong.items():
        with pytest.raises(UserError, match=message):
            load_adapter(load_model(lm)[0], folder, hf)
    publish(EXPERTS["mixtral"], tmp_path / "mixtral")
    routed = {"base_model.model.model.layers.0.mlp.gate.lora_A.weight": torch.ones(2, 2)}
    save_file(routed, changed(poems, tmp_path / "router") / "adapter_model.safetensors")
    for message, folder in {
        "ranks or scalings differ": per_expert(
            tmp_path / "mixtral", tmp_path / "ranks", ranks=(2, 3), rank_pattern={r"experts\.[1357]\.w.": 3}
        ),
        "DoRA, which stacks do not support": per_expert(tmp_path / "mixtral", tmp_path / "dora", use_dora=True),
        "layers.0.mlp.gate, which is not a layer or stack of experts": tmp_path / "router",
    }.items():
        mixtral, published = load_model(tmp_path / "mixtral")
        with pytest.raises(UserError, match=message):
            load_adapter(mixtral, folder, published)
    small = onward.DecoderConfig(vocab_size=9, d_model=16, n_layers=1, n_heads=2)
    with pytest.raises(UserError, match="does not fit this model: its shape is"):
        load_adapter(Decoder(small), poems, {})
