"""The doctor finds each planted bug with the right check, and reports nothing for healthy models."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import onward
from onward import Decoder, RunConfig, UserError, doctor
from onward.cli.shared.training import examine as examine_run
from onward.inspection.doctor.checks import CHEAP
from onward.inspection.doctor.training import TRAINING
from onward.parallel.processes import Processes

from support.decoders import DECODERS, decoder
from support.planted import GPT, LLAMA, MUTANTS, failures, model_of, planted


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_is_found_and_named(name: str) -> None:
    *_, check, said = MUTANTS[name]
    found = failures(doctor(planted(name), fresh=True, checks=[check]))
    assert found.keys() == {check}
    assert said in found[check]


def test_loss_over_the_wrong_axis_is_found_where_both_axes_are_as_long() -> None:
    assert "loss" in failures(doctor(planted("loss over the wrong axis", vocab_size=16), fresh=True, checks=["loss"]))


HEALTHY: dict[str, Callable[[], nn.Module]] = {
    "a GPT in one file": lambda: model_of(GPT),
    "a GPT in one file that returns all logits only if targets are given": lambda: model_of(
        GPT.replace("            return logits\n", "            return logits[:, -1:]\n")
    ),
    "a Llama in one file": lambda: model_of(LLAMA),
    **{name: lambda name=name: decoder(DECODERS[name]) for name in DECODERS},  # type: ignore[misc]
}


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_in(name: str) -> None:
    assert failures(doctor(HEALTHY[name](), fresh="in one file" in name)) == {}


@pytest.mark.parametrize("name", ["a GPT in one file", "a Llama in one file"])
def test_checks_apply_to(name: str) -> None:
    lacking = {f.check for f in doctor(HEALTHY[name](), fresh=True) if f.status == "not applicable"}
    trained = {"targets", "offset", "repetition", "tokenizer", "chat template", *TRAINING}
    assert lacking == trained | ({"rolled back", "experts"} if "GPT" in name else {"tied"})


@pytest.mark.long
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "not fresh"])
@pytest.mark.parametrize("kind", ["GPT2", "Llama", "GPTNeoX", "Mistral", "Qwen2", "Gemma2", "Mixtral", "OPT", "Bloom"])
def test_nothing_is_found_in_transformers(kind: str, fresh: bool) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 64, "max_position_embeddings": 64, "num_key_value_heads": 2, "head_dim": 8}
    if kind in ("GPT2", "Bloom"):
        sizes = {"vocab_size": 61, "n_embd": 32, "hidden_size": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    assert failures(doctor(transformers.AutoModelForCausalLM.from_config(config), fresh=fresh)) == {}


@pytest.mark.parametrize("preset", ["tiny", "mini", *(pytest.param(p, marks=pytest.mark.long) for p in ("small",))])
def test_cheap_half_finds_nothing_before_the_first_step_of_a_preset(preset: str) -> None:
    torch.manual_seed(0)
    said = before_training(Decoder(RunConfig(sources=("embedded",), preset=preset).decoder(300)))
    assert said == [f"ok    {len(CHEAP)} doctor checks found no problems in the model"]


def test_cheap_half_names_a_bug_before_the_first_step_only() -> None:
    model = decoder(DECODERS["llama"])
    model.blocks[0].register_forward_hook(lambda module, args, x: x + x.roll(-1, 1))
    assert before_training(model)[0].startswith("look  causal: changing tokens 6 and later changes earlier logits")
    assert before_training(model, step=1) == []


def before_training(model: nn.Module, step: int = 0) -> list[str]:
    """The doctor's messages in `onward train` for a model."""
    said: list[str] = []
    run: Any = SimpleNamespace(config=None, model=model, step=step, fresh=True, processes=Processes())
    examine_run(run, lambda sentence: said.append(str(sentence)))
    return said


# ---------------------------------------------------------------- facts given in addition to the model


def learned(shift: int) -> nn.Module:
    """A GPT that was trained on counting texts, with targets that are `shift` tokens ahead."""
    model = model_of(GPT.replace("0.1)", "0.0)"), width=16, layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(60):
        tokens = counting()
        F.cross_entropy(model(tokens)[:, : 17 - shift].flatten(0, 1), tokens[:, shift:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def counting() -> Tensor:
    """Texts (8, 17) in which each token id is the previous one plus one."""
    return (torch.randint(61, (8, 1)) + torch.arange(17)) % 61


@pytest.fixture(scope="module")
def copier() -> nn.Module:
    return learned(0)


@pytest.mark.parametrize("check", ["offset", "repetition"])
def test_model_that_was_trained_to_copy_is_found(copier: nn.Module, check: str) -> None:
    tokens = counting()
    about = {"trained": True, "batches": [(tokens[:, :-1], tokens[:, 1:])]}
    found = failures(doctor(copier, checks=[check], **about))  # type: ignore[arg-type]
    assert re.search(
        {"offset": r"offset \+0 is predicted best", "repetition": "repeats its last token"}[check], found[check]
    )


def test_model_that_has_learned_too_little_is_not_found_to_copy() -> None:
    tokens = counting()
    model = onward.Decoder(onward.DecoderConfig(vocab_size=61, d_model=32, n_layers=1, n_heads=2, tied=True))
    [found] = doctor(model, checks=["offset"], trained=True, batches=[(tokens[:, :-1], tokens[:, 1:])])
    assert found.status == "noted"
    assert found.what.endswith("too little for a verdict")


def test_model_that_was_trained_to_predict_is_not() -> None:
    tokens = counting()
    about = {"trained": True, "batches": [(tokens[:, :-1], tokens[:, 1:])]}
    found = doctor(learned(1), checks=["offset", "repetition"], **about)  # type: ignore[arg-type]
    assert [f.status for f in found] == ["ok", "noted"]


@pytest.mark.parametrize(("shift", "where"), [(0, "the token itself"), (2, "after the next"), (1, "")])
def test_batches_are_checked_for_targets_at(shift: int, where: str) -> None:
    tokens = counting()
    [found] = doctor(model_of(GPT), checks=["targets"], batches=[(tokens[:, :15], tokens[:, shift : 15 + shift])])
    assert (found.status == "ok") == (shift == 1)
    assert where in found.where


def test_loss_that_is_given_is_checked() -> None:
    right = lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten())
    wrong = lambda z, y: F.cross_entropy(z[:, :-1].flatten(0, 1), y[:, 1:].flatten())
    found = [doctor(model_of(GPT), checks=["loss"], loss=loss)[0] for loss in (right, wrong)]
    assert [(f.status, f.where) for f in found] == [
        ("ok", ""),
        ("failed", "the value is the loss of targets at offset 1"),
    ]


def test_loss_without_a_mean_and_broken_pattern_are_named() -> None:
    every = lambda z, y: F.cross_entropy(z.transpose(1, 2), y, reduction="none")
    [found] = doctor(model_of(GPT), checks=["loss"], loss=every)
    assert (found.status, found.what) == ("failed", "the loss has the shape (2, 16)")
    with pytest.raises(UserError, match="frozen is not a regular expression"):
        doctor(model_of(GPT), frozen="[")


def test_cache_that_is_given_is_checked() -> None:
    def kept(model: nn.Module) -> Callable[[Tensor], Tensor]:
        text = torch.empty(1, 0, dtype=torch.long)

        def step(tokens: Tensor) -> Tensor:
            nonlocal text
            text = torch.cat([text, tokens], 1)
            return model(text)[:, -tokens.size(1) :]  # type: ignore[no-any-return]

        return step

    found = {f.check: f.status for f in doctor(model_of(GPT), checks=["cached", "speed"], cache=kept)}
    assert found == {"cached": "ok", "speed": "failed"}


def test_parameter_that_should_be_frozen_is_named() -> None:
    [found] = doctor(model_of(GPT), checks=["gradients"], frozen=r"^embed|mlp\.0\.bias")
    assert found.status == "failed"
    assert "blocks.0.mlp.0.bias, blocks.1.mlp.0.bias, embed.weight" in found.where


def test_model_is_left_as_it_was() -> None:
    model, state = model_of(GPT), torch.random.get_rng_state()
    model.train()
    model.blocks[0].eval()  # type: ignore[index, union-attr]
    before = {name: p.clone() for name, p in model.state_dict().items()}
    onward.doctor(model, fresh=True)
    assert [module.training for module in model.children()] == [True] * len([*model.children()])
    assert not model.blocks[0].training  # type: ignore[index, union-attr]
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    assert torch.equal(state, torch.random.get_rng_state())


def test_adapter_says_how_a_model_is_called() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model_of(GPT)

        def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"out": self.inner(batch["ids"])}

    adapter = lambda model, tokens: model({"ids": tokens})["out"]
    assert failures(doctor(Named(), adapter=adapter, checks=["causal", "cached", "loss", "padding"])) == {}
