"""New adapters change nothing, only adapters and chosen modules are trained, and adapters are equivalent to their
merged weights everywhere."""

import copy
from dataclasses import dataclass, replace

import pytest
import torch

from onward import (
    EVA,
    Batch,
    Initialization,
    KVCache,
    LoRA,
    PiSSA,
    StepPlan,
    Trainer,
    UserError,
    add_lora,
    merge_lora,
    remove_lora,
    use_adapter,
)
from onward.model.adapters import adapter_names
from onward.training import optimizers
from onward.transforms import quantize_model
from onward.transforms.factors import principal
from onward.transforms.lora import adapters_of, weights

from support.adapters import LORA, stirred
from support.decoders import DECODERS, assert_close, config, decoder, token_ids


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_adapters_of_every_part_change_nothing_at_first_and_equal_the_merged_model(name: str) -> None:
    model, tokens = decoder(DECODERS[name], torch.float64), token_ids(DECODERS[name])
    plain = model(tokens)
    add_lora(model, LORA, "fresh")
    assert torch.equal(model(tokens), plain)
    remove_lora(model, "fresh")
    stirred(model, "one")
    adapted = model(tokens)
    assert (adapted - plain).abs().max() > 1e-3
    merged = copy.deepcopy(model)
    merge_lora(merged, "one")
    assert_close(merged(tokens), adapted)
    with use_adapter(model, ""):
        assert torch.equal(model(tokens), plain)


@torch.no_grad()
def test_dora_of_an_embedding_changes_nothing_at_first_and_equals_the_merged_model() -> None:
    model, tokens = decoder(DECODERS["gemma2"], torch.float64), token_ids(DECODERS["gemma2"])
    plain, lora = model(tokens), LoRA(rank=2, targets=("embed", "attn.q"), dora=True)
    add_lora(model, lora, "fresh")
    assert torch.equal(model(tokens), plain)
    stirred(model, "one", "two", lora=lora)
    apart = model(tokens)
    with use_adapter(model, ["two"] * len(tokens)):
        assert_close(model(tokens), apart)
    merge_lora(model, "two")
    assert_close(model(tokens), apart)
    assert (apart - plain).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
@torch.no_grad()
def test_trained_tokens_change_nothing_at_first_and_equal_the_merged_model(name: str) -> None:
    model, tokens = decoder(DECODERS[name], torch.float64), token_ids(DECODERS[name], rows=3)
    plain, lora = model(tokens), LoRA(rank=2, tokens=(int(tokens[0, 5]), 3))
    add_lora(model, lora, "fresh")
    assert_close(model(tokens), plain)
    remove_lora(model, "fresh")
    stirred(model, "one", "two", lora=lora)
    apart = {}
    for adapter in "one", "two", "":
        with use_adapter(model, adapter):
            apart[adapter] = model(tokens)
    assert torch.equal(apart[""], plain)
    assert (apart["one"][0, 5] - apart["two"][0, 5]).abs().max() > 1e-3
    with use_adapter(model, ["two", "", "one"]):
        together = model(tokens)
    for row, adapter in enumerate(["two", "", "one"]):
        assert_close(together[row], apart[adapter][row])
    tied = model.config.tied
    merge_lora(model, "two")
    assert_close(model(tokens), apart["two"])
    assert (model.head.weight is model.embed.weight) == tied == model.config.tied


@pytest.mark.parametrize("name", ["llama", "gpt2", "deepseek", "gpt-oss", "olmo2"])
@torch.no_grad()
def test_rows_with_different_adapters_equal_each_alone(name: str) -> None:
    model = stirred(decoder(DECODERS[name], torch.float64), "one", "two")
    tokens = token_ids(model.config, rows=4)
    chosen = ["two", "", "one", "two"]
    with use_adapter(model, chosen):
        together = model(tokens)
        cache = KVCache(model.config, 4, 12, 12, dtype=torch.float64)
        positions = torch.arange(12).expand(4, 12)
        cached = torch.cat([model(tokens[:, i : i + 1], positions[:, i : i + 1], cache) for i in range(12)], 1)
    assert_close(cached, together)
    for row, adapter in enumerate(chosen):
        with use_adapter(model, adapter):
            assert_close(together[row], model(tokens[row : row + 1])[0])


@pytest.mark.parametrize(
    "lora", [LoRA(rank=2), LoRA(rank=2, dora=True, targets=("attn",), dropout=0.1)], ids=["lora", "dora"]
)
@pytest.mark.parametrize("precision", ["", "int8", "int4"])
def test_only_adapters_and_whole_modules_are_trained(lora: LoRA, precision: str) -> None:
    model = decoder(config(d_model=32, n_heads=4, d_ff=64))
    if precision:
        quantize_model(model, precision)
    add_lora(model, replace(lora, full=("norm",)))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    tokens = token_ids(model.config)
    trainer = Trainer(model, optimizers(model, "adamw", 1e-2, 0.0, (0.9, 0.99)), lambda step: 1e-2)
    losses = [trainer.train_step(StepPlan([Batch(tokens[:, :-1], tokens[:, 1:])])).loss for _ in range(10)]
    assert losses[-1] < losses[0]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == ("_lora." not in name and name != "norm.weight"), name


@dataclass(frozen=True)
class Half(Initialization, kind="half"):
    """Initializes with half of PiSSA's values."""

    def factors(self, weight: torch.Tensor, rank: int, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = principal(weight, rank, scaling)
        return a, b / 2


@dataclass(frozen=True)
class Nothing(Initialization, kind="nothing"):
    """An initialization that lacks the method `factors`."""


@torch.no_grad()
def test_an_initialization_of_the_user_begins_as_the_base() -> None:
    model, tokens = decoder(DECODERS["llama"], torch.float64), token_ids(DECODERS["llama"])
    plain = model(tokens)
    add_lora(model, LoRA(rank=2, init=Half()), "half")  # also the name of a method of torch modules
    assert_close(model(tokens), plain)
    adapter = next(adapter for _, _, adapter in adapters_of(model, "half"))
    assert adapter.b.count_nonzero() == adapter.b.numel()


@pytest.mark.parametrize(
    ("lora", "name"),
    [
        (LoRA(rank=2, targets=("attn.q",)), "one"),
        (LoRA(rank=2, targets=("attn.k", "attn.q")), "one"),
        (LoRA(rank=2, targets=("attn.k",), tokens=(1,)), "one"),
        (LoRA(rank=2, targets=("attn.k",)), ""),
    ],
    ids=["repeated", "another target first", "tokens", "empty"],
)
def test_adapters_whose_name_is_refused_leave_the_model_unchanged(lora: LoRA, name: str) -> None:
    model = decoder(DECODERS["llama"])
    add_lora(model, LoRA(rank=2, targets=("attn.q",), tokens=(2, 3)), "one")
    state = lambda: {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    before = state()
    with pytest.raises(UserError, match=r"already has an adapter 'one'|name of an adapter is empty"):
        add_lora(model, lora, name)
    assert state() == before


def test_a_name_that_does_not_exist_is_one_sentence_with_the_nearest() -> None:
    model, mixture = decoder(DECODERS["llama"]), decoder(DECODERS["deepseek"])
    for make, message in (
        (lambda: add_lora(mixture, LoRA(dora=True)), "dora does not support stacks of experts such as"),
        (
            lambda: add_lora(model, LoRA(targets=("attn.qq",))),
            "target 'attn.qq' matches nothing .* did you mean attn.q?",
        ),
        (lambda: add_lora(model, LoRA(targets=("o_proj",))), "did you mean .*out?"),
        (lambda: add_lora(model, LoRA(full=("heads",))), "full 'heads' matches nothing .* did you mean head?"),
        (lambda: use_adapter(model, "poems"), "there is no adapter with the name 'poems'"),
        (lambda: add_lora(model, LoRA(tokens=(3, 900))), "Cannot train token 900, because the vocabulary has"),
        (
            lambda: add_lora(model, LoRA(targets=("embed",), tokens=(3,))),
            "Cannot train single tokens, because embed is trained",
        ),
        (lambda: add_lora(model, LoRA(ranks={"blocks": 0})), "ranks is 0 for all targets"),
        (lambda: add_lora(model, LoRA(bias="some")), "bias is 'some'"),  # type: ignore[arg-type]
        (lambda: add_lora(model, LoRA(init=PiSSA(), rank=999)), "rank 999, because it has at most rank"),
        (lambda: add_lora(model, LoRA(init=EVA())), "eva needs the inputs of layers"),
        (lambda: add_lora(model, LoRA(init=Nothing())), "Nothing lacks the method factors"),
        (lambda: LoRA(targets=()), "targets are empty"),
        (lambda: LoRA(targets=(), full=("norm",)), "targets are empty"),
    ):
        with pytest.raises(UserError, match=message):
            make()
    assert adapter_names(model) == []
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert {"blocks.0.attn.q", "head", "embed"} <= weights(model).keys()


@pytest.mark.parametrize("name", ["lora-v1.5", "d2l=4", "a, b", "half", "ü .é"])
@torch.no_grad()
def test_an_adapter_may_have_the_name_of_any_folder(name: str) -> None:
    model, tokens = decoder(DECODERS["llama"]), token_ids(DECODERS["llama"])
    plain = model(tokens)
    for one in (name, "other"):
        add_lora(model, LORA, one)
        for _, _, adapter in adapters_of(model, one):
            adapter.b.add_(0.1)
    assert adapter_names(model) == [name, "other"]
    with use_adapter(model, [name, ""] + ["other"] * (len(tokens) - 2)):
        mixed = model(tokens)
    with use_adapter(model, name):
        assert_close(mixed[0], model(tokens)[0])
    model.load_state_dict(model.state_dict())
    remove_lora(model, "other")
    merge_lora(model, name)
    assert adapter_names(model) == []
    assert (model(tokens) - plain).abs().max() > 1e-3
