"""Commands on tiny unusual models: recurrent layers, differential attention, contexts of 1 to 3 tokens, adapters."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import onward
from onward import (
    AttentionAndMamba2,
    AttentionOnly,
    Decoder,
    DecoderConfig,
    DifferentialAttention,
    GatedDeltaNet,
    LanguageModel,
    LoRA,
    Mamba2,
    PreNorm,
    SelfAttention,
    ShortConvolution,
    train_tokenizer,
)
from onward.cli import main
from onward.measuring.generation import trial

from support.pages import TEXT

DELTA, MAMBA = GatedDeltaNet(n_heads=4, d_key=6), Mamba2(n_heads=2, d_head=4, d_state=4)  # more heads than the rest
PLAIN = DecoderConfig(2, d_model=16, n_layers=2, n_heads=2, context_length=16)
CONFIGS = {
    "gated delta": replace(PLAIN, attention=DELTA),
    "mamba2": replace(PLAIN, attention=MAMBA),
    "hybrid": replace(PLAIN, attention=(DELTA, SelfAttention())),
    "attention and mamba2": replace(PLAIN, attention=AttentionAndMamba2(SelfAttention(), MAMBA, 0.5)),
    "without feed-forward": replace(PLAIN, attention=(MAMBA, SelfAttention()), block=(AttentionOnly(), PreNorm())),
    "short convolution": replace(PLAIN, n_layers=1, attention=ShortConvolution()),
    "differential": replace(PLAIN, attention=DifferentialAttention()),
    **{f"context of {length}": replace(PLAIN, context_length=length) for length in (1, 2, 3)},
}
NAMES = [*CONFIGS, "adapter"]
Models = Callable[[str], str]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The folder of a model, by name, with a character tokenizer and random weights."""
    folder, tokenizer = tmp_path_factory.mktemp("models"), train_tokenizer("char", [TEXT])

    def randomize(parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            torch.nn.init.normal_(parameter, std=0.2)

    def model(name: str) -> str:
        out = folder / name.replace(" ", "-")
        if out.exists():
            return str(out)
        torch.manual_seed(0)
        if name == "adapter":
            base = model("hybrid")
            lm = onward.load(base, device="cpu")
            onward.add_lora(lm.model, LoRA(rank=2, alpha=4))
            randomize([p for p in lm.model.parameters() if p.requires_grad])
            onward.save_adapter(lm, out, base)
        else:
            decoder = Decoder(replace(CONFIGS[name], vocab_size=tokenizer.vocab_size)).eval()
            randomize([*decoder.parameters()])
            onward.save(LanguageModel(decoder, tokenizer), out)
        return str(out)

    return model


def text_for(name: str) -> str:
    return "t" if name.startswith("context") else "to be"


@pytest.mark.parametrize("name", NAMES)
def test_verify_measures_the_promises_that_apply(name: str, models: Models, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", models(name), "--device", "cpu"]) == 0
    shown = capsys.readouterr()
    assert ("saved = loaded" in shown.out) == (name != "adapter") == ("not measured: saved" not in shown.err)
    assert ("speculated = target" in shown.out) == (name != "context of 1")
    assert "rolled back = plain" in shown.out


@pytest.mark.parametrize("name", NAMES)
def test_report_has_attention_only_of_layers_with_weights(name: str, models: Models, tmp_path: Path) -> None:
    assert main(["report", models(name), "--out", str(tmp_path / "page.html"), "--text", "to be or not"]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    weighted = name in ("hybrid", "without feed-forward", "adapter", "context of 2", "context of 3")
    assert ('id="attention"' in page) == weighted


@pytest.mark.parametrize("name", [name for name in NAMES if name != "context of 1"])
def test_explain_follows_a_token_through_each_layer(
    name: str, models: Models, capsys: pytest.CaptureFixture[str]
) -> None:
    without = 0
    for layer in "0", "-1":
        assert main(["explain", models(name), text_for(name), "--layer", layer]) == 0
        without += "no weights of one token over the earlier ones" in " ".join(capsys.readouterr().out.split())
    assert without == {"hybrid": 1, "without feed-forward": 1, "adapter": 1}.get(name, 0 if "context" in name else 2)


def test_roles_of_heads_need_a_context_of_four_tokens(models: Models, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", models("context of 3"), "heads"]) == 2
    assert "Cannot repeat a text in a context of 3 tokens: at least 4 are needed" in capsys.readouterr().err


@pytest.mark.parametrize("command", [pytest.param("doctor", marks=pytest.mark.long), "bench"])
def test_command_needs_a_context_of_four_tokens(
    command: str, models: Models, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, models("context of 2")]) == 2
    assert "with a context of 2 tokens" in capsys.readouterr().err


def test_a_context_of_one_token_is_measured_as_one_of_four() -> None:
    assert trial(replace(PLAIN, context_length=1), "float32", 1, torch.device("cpu")) > 0


@pytest.mark.parametrize("view", ["attention", "arrows"])
def test_attention_of_a_layer_without_weights_cannot_be_drawn(
    view: str, models: Models, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", models("hybrid"), "to be", view]) == 0  # of layer 1
    assert main(["inspect", models("hybrid"), "to be", view, "--layer", "0"]) == 2
    assert "choose layer 1" in capsys.readouterr().err
    assert main(["inspect", models("gated delta"), "to be", view]) == 2
    assert "no layer of this model has any" in capsys.readouterr().err
