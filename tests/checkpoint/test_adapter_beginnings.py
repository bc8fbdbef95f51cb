"""Initializations of adapters: values, training and files agree with PEFT's."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

from onward import (
    EVA,
    Batch,
    Decoder,
    Initialization,
    LoRA,
    OLoRA,
    PiSSA,
    StepPlan,
    Trainer,
    add_lora,
    merge_lora,
    use_adapter,
)
from onward.checkpoint.load import load_model
from onward.checkpoint.peft.adapters import load_adapter, save_adapter
from onward.checkpoint.peft.bases import BaseModel
from onward.training import optimizers
from onward.transforms.eva import explained_variance
from onward.transforms.lora import adapters_of, add_adapters, raised

from support.parity import publish

peft = pytest.importorskip("peft", reason="install peft to compare adapters with it")
create_loraplus_optimizer = pytest.importorskip("peft.optimizers").create_loraplus_optimizer

SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
LLAMA = LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=1)
TARGETS = ["q_proj", "v_proj", "down_proj"]
OURS = ("attn.q", "attn.v", "mlp.down")
TOKENS = torch.randint(40, (4, 24), generator=torch.Generator().manual_seed(0))
LABELS = TOKENS.masked_fill(torch.arange(24) < 9, -100)  # a prompt of nine tokens
# Onward's initialization, PEFT's keys, further fields
CASES: dict[str, tuple[Initialization, dict[str, Any], dict[str, Any]]] = {
    "pissa": (PiSSA(), {"init_lora_weights": "pissa"}, {}),
    "pissa, rsLoRA and DoRA": (PiSSA(), {"init_lora_weights": "pissa"}, {"rslora": True, "dora": True}),
    "pissa, randomized": (PiSSA(iterations=32), {"init_lora_weights": "pissa"}, {}),
    "olora": (OLoRA(), {"init_lora_weights": "olora"}, {}),
    "eva": (EVA(), {"init_lora_weights": "eva"}, {}),
    "eva, rsLoRA": (EVA(rho=3), {"init_lora_weights": "eva", "eva_config": peft.EvaConfig(rho=3)}, {"rslora": True}),
    "eva, equal ranks": (EVA(rho=1), {"init_lora_weights": "eva", "eva_config": peft.EvaConfig(rho=1)}, {}),
}
TOLERANCES = {"pissa, randomized": 2e-3, "eva, equal ranks": 1e-2}  # for randomized SVDs


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    publish(LLAMA, folder)
    return folder


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def batches() -> list[dict[str, Tensor]]:
    """Two batches of two rows, as PEFT reads them."""
    return [{"input_ids": TOKENS[i : i + 2], "labels": LABELS[i : i + 2]} for i in (0, 2)]


def theirs_with(base: Path, keys: dict[str, Any], fields: dict[str, Any]) -> Any:
    names = {"rslora": "use_rslora", "dora": "use_dora"}
    options = keys | {names[name]: value for name, value in fields.items()}
    config = peft.LoraConfig(r=3, lora_alpha=4, target_modules=TARGETS, task_type="CAUSAL_LM", **options)
    torch.manual_seed(0)
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    if keys["init_lora_weights"] == "eva":
        peft.initialize_lora_eva_weights(theirs, batches(), show_progress_bar=False)
    return theirs.eval()


def ours_with(base: Path, init: Initialization, fields: dict[str, Any]) -> tuple[Decoder, dict[str, Any]]:
    model, hf = load_model(base)
    lora = LoRA(rank=3, alpha=4, targets=OURS, init=init, **fields)
    torch.manual_seed(0)
    if isinstance(init, EVA):
        add_adapters(model, lora)
        explained_variance(model, lora, cycled())
    else:
        add_lora(model, lora)
    return model.eval(), hf


def cycled() -> Any:
    """The batches of `batches`, repeated, as `explained_variance` reads them."""
    for _ in range(100):
        for batch in batches():
            yield batch["input_ids"], None, batch["labels"] != -100


def train(model: Any) -> None:
    """Three steps of SGD, which do not depend on the signs of singular vectors."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    for _ in range(3):
        optimizer.zero_grad()
        logits = model(TOKENS)
        logits = logits if isinstance(logits, Tensor) else logits.logits
        F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
        optimizer.step()


@pytest.mark.parametrize("case", CASES)
def test_an_initialization_has_the_values_training_and_files_of_peft(case: str, base: Path, tmp_path: Path) -> None:
    init, keys, fields = CASES[case]
    (ours, hf), theirs = ours_with(base, init, fields), theirs_with(base, keys, fields)
    with torch.no_grad():
        plain = load_model(base)[0](TOKENS)
        torch.testing.assert_close(ours(TOKENS), plain, rtol=1e-5, atol=1e-5)
    layers = {name: module for name, module in theirs.named_modules() if hasattr(module, "lora_A")}
    names = dict(zip(("attn.q", "attn.v", "mlp.down"), TARGETS))
    tolerance = TOLERANCES.get(case, 1e-4)
    adapters = list(adapters_of(ours, "default"))
    assert len(adapters) == len(layers)
    for weight, _, adapter in adapters:
        layer, part = weight.split(".")[1], names[weight.split(".", 2)[2]]
        [module] = [m for name, m in layers.items() if f"layers.{layer}." in name and name.endswith(part)]
        a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
        assert adapter.scaling == pytest.approx(module.scaling["default"])
        torch.testing.assert_close(adapter.a.abs(), a.abs(), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(adapter.b.abs(), b.abs(), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(adapter.b @ adapter.a, b @ a, rtol=tolerance, atol=tolerance)

    train(theirs)
    train(ours)
    with torch.no_grad():
        wanted = theirs(TOKENS).logits
        assert (wanted - plain).abs().max() > 0.01
        torch.testing.assert_close(ours(TOKENS), wanted, rtol=tolerance, atol=tolerance)
        save_adapter(ours, tmp_path / "ours", hf, BaseModel(str(base), ""))
        loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "ours").eval()
        torch.testing.assert_close(loaded(TOKENS).logits, ours(TOKENS), rtol=1e-5, atol=1e-5)
        with use_adapter(ours, ""):
            assert torch.equal(ours(TOKENS), plain)
    back, _ = load_model(base)
    load_adapter(back, tmp_path / "ours", hf)
    train(back)
    train(theirs)
    with torch.no_grad():
        torch.testing.assert_close(back(TOKENS), theirs(TOKENS).logits, rtol=tolerance, atol=tolerance)
        merged = copy.deepcopy(ours)
        merge_lora(merged)
        torch.testing.assert_close(merged(TOKENS), ours(TOKENS), rtol=1e-5, atol=1e-5)


FURTHER: dict[str, dict[str, Any]] = {
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
    "biases of adapted layers": {"bias": "lora_only"},
    "all biases, whole modules": {"bias": "all", "modules_to_save": ["norm"]},
    "tokens": {"trainable_token_indices": [21, 4, 30]},
}


@pytest.mark.parametrize("case", FURTHER)
def test_an_adapter_of_peft_is_trained_further_as_peft_does(case: str, tmp_path: Path) -> None:
    """The base has biases and a tied head."""
    torch.manual_seed(0)
    hf = LlamaConfig(**SIZES, num_attention_heads=2, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    publish(hf, tmp_path / "base")
    config = peft.LoraConfig(r=3, target_modules=TARGETS, task_type="CAUSAL_LM", **FURTHER[case])
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config).eval()
    theirs.save_pretrained(tmp_path)
    ours, keys = load_model(tmp_path / "base")
    load_adapter(ours, tmp_path, keys)
    count = sum(p.numel() for p in theirs.parameters() if p.requires_grad)
    assert sum(p.numel() for p in ours.parameters() if p.requires_grad) == count
    train(theirs)
    train(ours)
    with torch.no_grad():
        torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits, rtol=1e-4, atol=1e-4)


def test_lora_plus_makes_the_steps_of_peft(base: Path, tmp_path: Path) -> None:
    """The adapter uses DoRA, whose magnitudes are vectors: these get the raised learning rate, too."""
    ours, hf = load_model(base)
    lora = LoRA(rank=3, targets=OURS, dora=True, b_rate=16)
    add_lora(ours, lora)
    save_adapter(ours, tmp_path, hf, BaseModel(str(base), ""))
    model = AutoModelForCausalLM.from_pretrained(base)
    theirs = peft.PeftModel.from_pretrained(model, tmp_path, is_trainable=True).eval()
    adamw = create_loraplus_optimizer(theirs, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16, betas=(0.9, 0.99))
    rates = dict.fromkeys(raised(ours), lora.b_rate)
    trainer = Trainer(ours, optimizers(ours, "adamw", 1e-3, 0.0, (0.9, 0.99), rates), lambda step: 1e-3)
    for _ in range(4):
        adamw.zero_grad()
        theirs(input_ids=TOKENS, labels=TOKENS).loss.backward()
        adamw.step()
        trainer.train_step(StepPlan([Batch(TOKENS[:, :-1], TOKENS[:, 1:])]))
    with torch.no_grad():
        assert (theirs(TOKENS).logits - load_model(base)[0](TOKENS)).abs().max() > 0.01
        torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits, rtol=1e-4, atol=1e-4)
