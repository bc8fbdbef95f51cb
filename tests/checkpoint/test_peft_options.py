"""Every key of PEFT's LoraConfig, with several values: either the logits of PEFT or an error that names the key.

The fuzzer runs a seeded sample by default and many more cases with `-m long`.
"""

import copy
import dataclasses
import json
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from onward import UserError, merge_lora, use_adapter
from onward.base.arguments import field_types
from onward.checkpoint.load import load_model
from onward.checkpoint.peft.adapters import load_adapter, save_adapter
from onward.checkpoint.peft.bases import BaseModel
from onward.checkpoint.peft.config import CHANGED_BASE, WITHOUT_EFFECT, LoraConfig

from support.families import CASES
from support.parity import publish

TOKENS = torch.randint(30, (2, 12), generator=torch.Generator().manual_seed(0))
peft = pytest.importorskip("peft", reason="install peft to compare adapters with it")

LLAMA: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
BASES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**LLAMA, attention_bias=True),
    "tied": LlamaConfig(**LLAMA, tie_word_embeddings=True),
    **{name: next(hf for hf in CASES.values() if hf.model_type == name) for name in ("gpt2", "phi3", "gemma3_text")},
}
LAYERS = {
    "gpt2": ["c_attn", "c_fc", "c_proj", "wte", "lm_head", "mlp.c_proj"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj", "embed_tokens", "lm_head"],
}
OTHERS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "self_attn.k_proj", "embed_tokens", "lm_head"]
SAME_BASE = True, False, "gaussian", "orthogonal", "eva", "mica"
HONORED: dict[str, list[Any]] = {  # values that Onward accepts
    "lora_alpha": [1, 5, 16, 2.5],
    "lora_dropout": [0.0, 0.3],
    "use_rslora": [True],
    "use_dora": [True],
    "init_lora_weights": [*SAME_BASE, "pissa", "olora"],
    "rank_pattern": [{"q_proj": 4}, {r".*\.0\..*": 4}, {"c_attn": 4, "qkv_proj": 6}, {"^model.layers.1.*": 4}],
    "alpha_pattern": [{"q_proj": 3}, {r".*\.0\..*": 3.5}, {"c_.*": 5, "c_attn": 9}, {"embed_tokens|wte": 3}],
    "layers_to_transform": [[0], 1, [0, 1]],
    "layers_pattern": ["layers", ["h"]],
    "exclude_modules": [["q_proj"], r".*\.1\..*", ["c_fc", "layers.0.mlp.down_proj"]],
    "modules_to_save": [["norm"], ["lm_head"], ["embed_tokens"], ["ln_f"]],
    "ensure_weight_tying": [True],
    "fan_in_fan_out": [True],
    "target_modules": ["all-linear"],
    "qalora_group_size": [8],
    "megatron_core": ["other.core"],
    "revision": ["main"],
    "task_type": [None, "CAUSAL_LM"],
    "inference_mode": [True],
    "eva_config": [{"rho": 1.5}],
    "corda_config": [{"corda_method": "kpm"}],
    "loftq_config": [{"loftq_bits": 4}],
    "lora_ga_config": [{"direction": "random"}],
    "target_parameters": [["q_proj.weight"], ["0.mlp.gate_proj.weight"]],
    "r": [1, 2, 6],
    "bias": ["none", "lora_only", "all"],
    "trainable_token_indices": [[1, 2], [7, 3, 11], {"embed_tokens": [4, 2]}, {"wte": [5]}],
}
REFUSED: dict[str, list[Any]] = {
    "lora_bias": [True],
    "layer_replication": [[[0, 2], [1, 2]]],
    "alora_invocation_tokens": [[3, 4]],
    "velora_config": [{"num_groups": 4}],
    "kasa_config": [{}],
    "monteclora_config": [{}],
    "use_bdlora": [{"nblocks": 2, "target_modules_bd_a": ["q_proj"]}],
    "use_qalora": [True],
    "init_lora_weights": ["pissa_niter_4"],
}
UNMADE: dict[str, list[Any]] = {  # values that PEFT writes only with other programs, data or adapters; unknown keys
    "arrow_config": [{"top_k": 2}],
    "megatron_config": [{"hidden_size": 4}],
    "init_lora_weights": ["lora_ga", "corda", "loftq", "of tomorrow"],
    "a_key_of_tomorrow": [1],
}
WRONG = [None, -1, 0, 1e400, "x", "(", True, [], ["x"], {"q_proj": "x"}, {"(": 2}, {"q_proj": -3}]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of the models, by name."""
    folder = tmp_path_factory.mktemp("bases")
    for name, hf in BASES.items():
        publish(hf, folder / name)
    return {name: folder / name for name in BASES}


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@torch.no_grad()
def written(base: Path, folder: Path, seed: int, **options: Any) -> torch.Tensor:
    """The logits of a model with an adapter of random tensors, which PEFT makes with these options and saves in a
    folder. If PEFT cannot make the adapter, PEFT's exception is raised."""
    torch.manual_seed(seed)
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(**options)).eval()
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter) * 0.2)
    theirs.save_pretrained(folder)
    return theirs(TOKENS).logits


@torch.no_grad()
def assert_logits(base: Path, folder: Path, wanted: torch.Tensor) -> None:
    """Compare logits with PEFT's, with the adapter attached and merged."""
    ours, hf = load_model(base)
    load_adapter(ours, folder, hf)
    ours.eval()
    for use in (lambda: None, lambda: merge_lora(ours)):
        use()
        torch.testing.assert_close(ours(TOKENS), wanted, rtol=0, atol=2e-4 * wanted.abs().max().item())


def with_keys(adapter: Path, folder: Path, **keys: Any) -> Path:
    """A copy of an adapter with these keys in its adapter_config.json."""
    shutil.copytree(adapter, folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return folder


@pytest.mark.fuzzer
@pytest.mark.parametrize("count", [24, pytest.param(3000, marks=pytest.mark.long)])
def test_an_adapter_of_any_options_has_the_logits_of_peft_or_is_refused(
    count: int, bases: dict[str, Path], tmp_path: Path
) -> None:
    failures, compared = list[tuple[object, ...]](), 0
    # seed 125 trains tokens of a module by its name; seed 6461 has a pattern for a layer that is targeted as a
    # parameter
    for seed in [*range(count), 125, 6461]:
        choose = random.Random(seed)
        name = choose.choice([*BASES])
        keys = {key: choose.choice(HONORED[key]) for key in choose.sample([*HONORED], choose.randint(0, 5))}
        if wrong := choose.choice([*REFUSED]) if choose.random() < 0.2 else "":
            keys[wrong] = choose.choice(REFUSED[wrong])
        layers = LAYERS.get(name, OTHERS)
        options = {"r": 2, "target_modules": choose.sample(layers, choose.randint(1, 3)), **keys}
        folder = tmp_path / str(seed)
        try:
            wanted = written(bases[name], folder, seed, **copy.deepcopy(options))
        except Exception:  # a combination that PEFT refuses
            continue
        changed_embedding = keys.get("init_lora_weights") in CHANGED_BASE and name in ("tied", "gpt2", "gemma3_text")
        try:
            assert_logits(bases[name], folder, wanted)
            compared += 1
            if wrong:
                failures.append((seed, name, options, f"{wrong} is accepted"))
        except UserError as error:
            if (wrong or "init_lora_weights" * changed_embedding or "no excuse") not in str(error):
                failures.append((seed, name, options, error))
        except Exception as error:
            failures.append((seed, name, options, f"{type(error).__name__}: {error}"[:300]))
    assert not failures, "\n".join(map(str, failures))
    assert compared > count // 3


def test_every_key_of_peft_is_read_without_effect_or_refused() -> None:
    keys = {one.name for one in dataclasses.fields(peft.LoraConfig)}
    known = {*field_types(LoraConfig), *REFUSED, *UNMADE}
    assert {key for key in keys if key not in known and not WITHOUT_EFFECT.fullmatch(key)} == set()
    read = {key for key in field_types(LoraConfig) if key not in HONORED}
    assert read == set(), "the fuzzer has no values for these keys"


@pytest.fixture(scope="module")
def plain(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the model `llama`."""
    folder = tmp_path_factory.mktemp("plain")
    written(bases["llama"], folder, 0, r=2, target_modules=["q_proj"])
    return folder


CASES_OF_KEYS = [(key, value) for table in (REFUSED, UNMADE) for key, values in table.items() for value in values]


@pytest.mark.parametrize(("key", "value"), CASES_OF_KEYS)
def test_a_key_that_onward_lacks_is_refused_by_name(
    key: str, value: Any, bases: dict[str, Path], plain: Path, tmp_path: Path
) -> None:
    if value == {}:
        value = {"beta": 1e-4}  # a value as PEFT writes it
    model, hf = load_model(bases["llama"])
    with pytest.raises(UserError, match=f"adapter_config.json has {key} "):
        load_adapter(model, with_keys(plain, tmp_path / "adapter", **{key: value}), hf)


def test_a_key_of_a_wrong_type_is_one_sentence(bases: dict[str, Path], plain: Path, tmp_path: Path) -> None:
    model, hf = load_model(bases["llama"])
    sentences = []
    for key in field_types(LoraConfig):
        for i, value in enumerate(WRONG):
            folder = with_keys(plain, tmp_path / f"{key}{i}", **{key: value})
            try:
                load_adapter(model, folder, hf, f"{key}-{i}")
            except UserError as error:
                sentences.append((folder, str(error)))
    assert [sentence for folder, sentence in sentences if str(folder) not in sentence] == []
    assert len(sentences) > 80


@torch.no_grad()
@pytest.mark.parametrize("kind", ["pissa", "olora"])
def test_an_adapter_with_a_changed_base_is_also_read_as_peft_converts_it(
    kind: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=kind, lora_alpha=3)
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(bases["llama"]), config).eval()
    theirs.save_pretrained(tmp_path / "first")
    torch.manual_seed(0)
    for name, parameter in theirs.named_parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2 * ("lora_" in name))
    theirs.save_pretrained(tmp_path / "as it is")
    theirs.save_pretrained(tmp_path / "converted", path_initial_model_for_weight_conversion=str(tmp_path / "first"))
    for name in "as it is", "converted":
        assert_logits(bases["llama"], tmp_path / name, theirs(TOKENS).logits)
    both, hf = load_model(bases["llama"])
    wanted = both(TOKENS)
    for name in "as it is", "converted":
        load_adapter(both, tmp_path / name, hf, name.replace(" ", "_"))
    with use_adapter(both, ""):
        assert torch.equal(both(TOKENS), wanted), "the base is unchanged"
    save_adapter(both, tmp_path / "ours", hf, BaseModel("", ""), "as_it_is")
    assert_logits(bases["llama"], tmp_path / "ours", theirs(TOKENS).logits)


def test_a_changed_base_is_refused_where_the_change_does_not_follow(bases: dict[str, Path], tmp_path: Path) -> None:
    for base, kind, target, quantize, message in (
        ("llama", "pissa", "gate_proj", "int8", "which is for layers with plain weights"),
        ("tied", "pissa", "lm_head", None, "which changed the embedding too, as the head shares its weight"),
        ("gpt2", "olora", "attn.c_proj", None, "of the transposed weight in this family"),
    ):
        folder = tmp_path / f"{base}-{target}"
        written(bases[base], folder, 0, r=2, target_modules=[target], init_lora_weights=kind)
        model, hf = load_model(bases[base], quantize=quantize)
        with pytest.raises(UserError, match=f"init_lora_weights is {kind}, {message}"):
            load_adapter(model, folder, hf)


def test_an_adapter_of_another_embedding_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    written(bases["llama"], tmp_path / "adapter", 0, r=2, target_modules=["embed_tokens"])
    written(bases["llama"], tmp_path / "whole", 0, r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    other, hf = load_model(bases["llama"])
    other.embed.weight.data[3] += 1
    publish(LlamaConfig(**LLAMA | {"vocab_size": 44}), tmp_path / "longer")
    for (model, config), name, message in (
        ((other, hf), "adapter", r"made for a base with another model\.embed_tokens\.weight"),
        (load_model(tmp_path / "longer"), "adapter", r"has model\.embed_tokens\.weight of another shape"),
        (load_model(tmp_path / "longer"), "whole", r"has lm_head\.weight of another shape"),
    ):
        with pytest.raises(UserError, match=message):
            load_adapter(model, tmp_path / name, config)


def test_modules_trained_whole_do_not_change_the_base_of_another_adapter(
    bases: dict[str, Path], plain: Path, tmp_path: Path
) -> None:
    written(bases["llama"], tmp_path / "whole", 0, r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    for first, second in ((plain, tmp_path / "whole"), (tmp_path / "whole", plain)):
        model, hf = load_model(bases["llama"])
        load_adapter(model, first, hf, "first")
        with pytest.raises(UserError, match="fully trained, which changes the base of both"):
            load_adapter(model, second, hf, "second")
