"""muP: the changes of activations, and with them the best learning rate, hardly depend on the width."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from onward import Batch, Decoder, DecoderConfig, NoNorm, RMSNorm, Run, RunConfig, SelfAttention, StepPlan, UserError
from onward.training.step.build import build_trainer
from onward.training.step.mup import factors, factors_of, scale_weights

from support.runs import config as run_config

BASE, RATE, STEPS = 32, 2**-7, 10
OPTIONS: dict[str, Any] = {"preset": "tiny", "steps": STEPS, "learning_rate": RATE, "schedule": "constant"}
OPTIONS |= {"warmup": 0.0, "clip": 0.0, "precision": "fp32", "device": "cpu", "mup": BASE}
SHAPES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tied": False},
    "no q and k norms": {"attention": "self(qk_norm=none)"},
    "convolutions": {"attention": "short_convolution"},
    "gated delta": {"attention": "gated_delta"},
    "mamba2": {"attention": "mamba2(d_head=8)"},
    "experts": {"mlp": "experts(count=4)", "d_ff": 0},
}


def new(width: int, changes: dict[str, Any], **options: Any) -> tuple[RunConfig, Decoder]:
    """A configuration and its decoder."""
    config = RunConfig(**OPTIONS | {"model": {"d_model": width, **changes}} | options)
    torch.manual_seed(0)
    model = Decoder(config.decoder(64))
    scale_weights(model, factors_of(config, model.config))
    return config, model


def moved(width: int, changes: dict[str, Any], **options: Any) -> dict[str, float]:
    """The root mean square change of each activation in STEPS steps."""
    config, model = new(width, changes, **options)
    chain = torch.randperm(64, generator=torch.Generator().manual_seed(0))  # the token that follows each token
    text = [torch.randint(64, (8, 1), generator=torch.Generator().manual_seed(1))]
    for _ in range(32):
        text.append(chain[text[-1]])
    tokens = torch.cat(text, 1)
    seen: dict[str, torch.Tensor] = {}

    def activations() -> dict[str, torch.Tensor]:
        with torch.no_grad():
            return {"logits": model.eval()(tokens), **seen}

    for name, module in model.named_modules():
        if name.endswith((".attn", ".mlp")) or (name.startswith("blocks.") and name.count(".") == 1):
            module.register_forward_hook(lambda _, __, out, name=name: seen.update({name: out.clone()}))
    before = activations()
    for _ in build_trainer(config, model).train(StepPlan([Batch(tokens[:, :-1], tokens[:, 1:])]) for _ in range(STEPS)):
        pass
    return {name: float((now - before[name]).square().mean().sqrt()) for name, now in activations().items()}


def walks(seed: int, rows: int = 8, length: int = 33) -> Batch:
    """Random walks in which each of 64 tokens is followed by one of four tokens."""
    follow = torch.randint(64, (64, 4), generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(64, (rows, length), generator=random)
    for i in range(1, length):
        tokens[:, i] = follow[tokens[:, i - 1], torch.randint(4, (rows,), generator=random)]
    return Batch(tokens[:, :-1], tokens[:, 1:])


def loss_after(width: int, rate: float, steps: int = 30, **options: Any) -> float:
    """The loss on new walks after `steps` steps, each on different walks."""
    options |= {"learning_rate": rate, "steps": steps, "schedule": "linear", "warmup": 0.1, "clip": 1.0}
    config, model = new(width, {"n_layers": 1}, **options)
    for _ in build_trainer(config, model).train(StepPlan([walks(step)]) for step in range(1, steps + 1)):
        pass
    held_out = walks(0, rows=64)
    with torch.no_grad():
        return float(cross_entropy(model.eval()(held_out.tokens).flatten(0, 1), held_out.targets.flatten()))


def growth(widths: list[int], changes: dict[str, Any], **options: Any) -> list[float]:
    """For each activation, the ratio of its largest to its smallest change over the widths."""
    found = [moved(width, changes, **options) for width in widths]
    return [max(one[name] for one in found) / min(one[name] for one in found) for name in found[0]]


def test_changes_of_activations_do_not_grow_with_the_width() -> None:
    assert max(growth([32, 128], SHAPES["tied"])) < 1.4
    assert min(growth([32, 128], SHAPES["tied"], mup=0)) > 2, "without muP, the changes grow"


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("shape", SHAPES)
def test_changes_of_activations_are_flat_from_width_64_to_512(shape: str, optimizer: str) -> None:
    """A learning rate that is wrong by the square root of the width would give 8 ** 0.5 = 2.8."""
    assert max(growth([64, 128, 256, 512], SHAPES[shape], optimizer=optimizer)) < 2


@pytest.mark.long
def test_best_learning_rate_stays_within_one_grid_step_from_width_64_to_512() -> None:
    rates = [2.0**power for power in range(-9, -2)]

    def best(width: int, base: int) -> int:
        losses = [loss_after(width, rate, mup=base) for rate in rates]
        return losses.index(min(losses))

    at_64 = best(64, 64)
    assert 0 < at_64 < len(rates) - 1
    assert all(abs(best(width, 64) - at_64) <= 1 for width in (128, 256, 512))
    assert best(512, 0) <= at_64 - 2, "without muP, it falls"


@pytest.mark.parametrize("width", [64, 128])
def test_decay_of_a_step_does_not_depend_on_the_width(width: int) -> None:
    config = RunConfig(**OPTIONS | {"model": {"d_model": width}, "weight_decay": 0.1})
    groups = build_trainer(config, Decoder(config.decoder(64))).optimizers[0].param_groups
    assert {round(g["rate"] * g["weight_decay"], 9) for g in groups} == {0.0, 0.1}
    assert min(group["rate"] for group in groups) == BASE / width


def test_factors_are_one_at_the_base_width_and_depend_on_heads_alone_for_scores() -> None:
    config = RunConfig(**OPTIONS | {"model": {"d_model": BASE}})
    assert {(f.init, f.rate) for f in factors_of(config, config.decoder(64)).values()} == {(1.0, 1.0)}
    same = [{"d_model": 64, "n_heads": 2}, {"d_model": 128, "n_heads": 4}]  # heads of 32
    rates = [
        factors_of(config, replace(config, model=model).decoder(64))["blocks.0.attn.q_norm.weight"].rate
        for model in same
    ]
    assert rates == pytest.approx([(BASE / 4 / 32) ** 0.5] * 2)


def test_scaled_weights_count_the_offset_of_a_norm() -> None:
    config = DecoderConfig(vocab_size=9, d_model=64, n_layers=1, n_heads=2, norm=RMSNorm(offset=1.0), embed_scale=8.0)
    model = Decoder(config)
    found = factors(config, 16, 32)  # m is 4
    scale_weights(model, found)
    assert (model.norm.weight + 1).tolist() == pytest.approx([1 / 4] * 64), "logits / m"
    assert found["embed.weight"].init == 0.5, "the root of the width multiplies the embeddings already"
    assert factors(replace(config, tied=True), 16, 32)["norm.weight"].init == 0.5


def test_run_with_mup_resumes_with_its_rates_and_saves_a_folder_of_its_preset(story_file: Path, tmp_path: Path) -> None:
    options = run_config(story_file, tmp_path / "run", mup=8, steps=2, validate_every=2)
    run = Run.start(options)
    assert run.model.norm.weight.tolist() == [8 / 32] * 32, "logits / m"
    next(iter(run.train(stop=lambda: True)), None)
    again = Run.resume(tmp_path / "run")
    assert again.model.config == replace(options, mup=0).decoder(again.tokenizer.vocab_size)
    rates = [{group["rate"] for one in each.trainer.optimizers for group in one.param_groups} for each in (run, again)]
    assert rates[0] == rates[1] == {1.0, 8 / 32, 8**0.5 / 32**0.5}
    assert '"model_type": "qwen3"' in (tmp_path / "run/config.json").read_text()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"base": "gpt2"}, "those of base are trained"),
        ({"optimizer": "torch.optim:NAdam"}, "optimizer is torch.optim:NAdam"),
    ],
)
def test_mup_is_refused_where_it_is_not_known(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        RunConfig(**OPTIONS | options)


def test_decoder_whose_logits_no_weight_scales_is_refused() -> None:
    config = DecoderConfig(vocab_size=9, d_model=64, n_layers=1, n_heads=2, tied=True, final_norm=NoNorm())
    with pytest.raises(UserError, match="head is tied and its final norm has no weight"):
        factors(config, 16, 32)
    assert factors(replace(config, tied=False), 16, 32)["head.weight"].rate == 1 / 4


def test_decoder_whose_scores_no_weight_scales_is_refused() -> None:
    attention, norm = SelfAttention(qk_norm="head"), RMSNorm(weight=False)
    config = DecoderConfig(vocab_size=9, d_model=64, n_layers=1, n_heads=2, attention=attention, norm=norm)
    with pytest.raises(UserError, match="the norm of queries has no weight"):
        factors(config, 16, 32)
