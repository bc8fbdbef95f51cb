"""Adapters as PEFT folders: the same logits in both directions, for the names of every kind of family."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import onward
from onward.checkpoint.adapters import load_adapter, save_adapter
from onward.checkpoint.bases import BaseModel, check_base, weights_checksum
from onward.checkpoint.folder import load_model, save_model
from onward.cli import main
from onward.errors import UserError
from onward.model.decoder import Decoder
from onward.model.lora import LoRA, add_lora, merge_lora

from support.decoders import assert_close, token_ids
from support.families import CASES
from support.parity import publish

FAMILIES = "bloom", "cohere", "gpt2", "gpt_neox", "llama", "mixtral", "openai_gpt", "opt", "phi3", "qwen3_moe"
PUBLISHED = {
    name: next(hf for hf in CASES.values() if hf.model_type == name.replace("_", "-"))
    if name == "openai_gpt"
    else next(hf for hf in CASES.values() if hf.model_type == name)
    for name in FAMILIES
}
KINDS = {
    "LoRA": LoRA(rank=3, alpha=7.0, targets=("blocks",)),
    "rsLoRA, embedding and head": LoRA(rank=2, targets=("attn.q", "embed", "head"), rslora=True),
    "DoRA, a part of a fused tensor, a whole norm": LoRA(
        rank=3, targets=("attn.k", "attn.out"), dora=True, full=("norm",)
    ),
}


def trained(folder: Path, lora: LoRA) -> tuple[Decoder, dict[str, Any]]:
    """A model with adapters that change it."""
    model, hf = load_model(folder)
    torch.manual_seed(1)
    add_lora(model, lora)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model, hf


@pytest.mark.parametrize(
    ("family", "kind"),
    [(f, k) for i, f in enumerate(FAMILIES) for j, k in enumerate(KINDS) if (i + j) % 3 == 0 or f == "gpt2"],
)
@torch.no_grad()
def test_an_adapter_has_the_logits_of_peft_whichever_of_the_two_wrote_it(
    family: str, kind: str, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft", reason="install peft to compare adapters with it")
    base, written = tmp_path / "base", tmp_path / "adapter"
    publish(PUBLISHED[family], base)
    ours, hf = trained(base, KINDS[kind])
    save_adapter(ours, written, hf, BaseModel(str(base), weights_checksum(base)))
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), written).eval()
    tokens = token_ids(ours.config)
    wanted = theirs(tokens).logits
    assert_close(ours(tokens), wanted)
    with theirs.disable_adapter():
        assert (theirs(tokens).logits - wanted).abs().max() > 0.01

    theirs.save_pretrained(tmp_path / "theirs")
    folders = [written] if "moe" in family or family == "mixtral" else [written, tmp_path / "theirs"]
    for folder in folders:  # PEFT fuses adapters of experts, in names that only it reads
        back, _ = load_model(base)
        load_adapter(back, folder, hf)
        assert_close(back(tokens), wanted)
        merge_lora(back)
        assert_close(back(tokens), wanted)
        assert not any("_lora." in name for name, _ in back.named_parameters())


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
    """An adapter of that model."""
    model = onward.load(lm)
    model.model = trained(lm, LoRA(rank=2))[0]
    onward.save_adapter(model, lm.parent / "poems", lm)
    return lm.parent / "poems"


def test_an_adapter_loads_on_its_base_by_either_name(lm: Path, poems: Path) -> None:
    one, other, base = onward.load(poems), onward.load(lm, adapter=poems), onward.load(lm)
    texts = [model.generate("abc", 8, temperature=0) for model in (one, other, base)]
    assert texts[0] == texts[1] != texts[2]
    with pytest.raises(UserError, match="has the adapter poems"):
        onward.save(one, lm.parent / "other")


def test_merge_is_rounded_once_and_loads_in_transformers(lm: Path, poems: Path, tmp_path: Path) -> None:
    assert main(["merge", str(poems), str(tmp_path / "merged"), "--dtype", "bfloat16"]) == 0
    merged, exact = load_model(tmp_path / "merged")[0], trained(lm, LoRA(rank=2))[0]
    merge_lora(exact)
    for (name, rounded), (_, wanted) in zip(merged.named_parameters(), exact.named_parameters()):
        assert torch.equal(rounded, wanted.bfloat16()), name
    AutoModelForCausalLM.from_pretrained(tmp_path / "merged")


def test_commands_take_an_adapter(lm: Path, poems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["generate", str(lm), "abc", "--adapter", str(poems), "--temperature", "0", "--max-new-tokens", "8"]) == 0
    )
    assert capsys.readouterr().out.strip() == "abc" + onward.load(poems).generate("abc", 8, temperature=0).rstrip()


def changed(adapter: Path, folder: Path, **keys: Any) -> Path:
    """A copy of an adapter with other keys in its adapter_config.json."""
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
        "is a LOHA adapter": changed(poems, tmp_path / "loha", peft_type="LOHA"),
        "no adapter_config.json": tmp_path / "other",
    }
    for message, folder in wrong.items():
        with pytest.raises(UserError, match=message):
            load_adapter(load_model(lm)[0], folder, hf)
    small = onward.DecoderConfig(vocab_size=9, d_model=16, n_layers=1, n_heads=2)
    with pytest.raises(UserError, match="does not fit this model: its shape is"):
        load_adapter(Decoder(small), poems, {})
