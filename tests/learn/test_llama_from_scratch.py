"""The models that chapters 7 and 12 build from empty files load folders of the published forms, with equal logits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import onward
from onward.learn.cells import cells
from onward.learn.chapters import find_chapter

LLAMA = {"vocab_size": 90, "hidden_size": 36, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 9}
LLAMA |= {"num_key_value_heads": 3, "tie_word_embeddings": True, "max_position_embeddings": 64}
GPT2 = {"vocab_size": 90, "n_embd": 36, "n_layer": 2, "n_head": 3, "n_positions": 64}


def loader(chapter: str, model: str, load: str) -> Callable[[Path], torch.nn.Module]:
    """The function `load` of a chapter, without the training that follows it."""
    names: dict[str, Any] = {}
    written = [cell.code for cell in cells(find_chapter(chapter).text)]
    imports = "import json\nimport math\nimport torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"
    exec(imports, names)
    for start in ("class CausalSelfAttention", "class MLP", "class Block", f"class {model}("):
        code = next((code for code in written if start in code), "")
        exec(code.split("\n\n\ngrow(")[0].partition("\n\n\ntorch.manual_seed")[0], names)
    code = next(code for code in written if f"def {load}" in code)
    exec("from pathlib import Path\nfrom safetensors.torch import load_file\n", names)
    exec(f"def {load}" + code.partition(f"def {load}")[2].partition("\n\n\n")[0], names)
    return names[load]  # type: ignore[no-any-return]


def like_smollm2(folder: Path) -> None:
    """A random model in the form of SmolLM2-135M: bf16, a tied head, grouped keys, rope_theta among the sizes, and keys
    of its training library."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**LLAMA, rope_parameters={"rope_type": "default", "rope_theta": 1e5})
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    stored = json.loads((folder / "config.json").read_text())
    theta = stored.pop("rope_parameters")["rope_theta"]
    stored |= {"rope_theta": theta, "rope_scaling": None, "rope_interleaved": False, "is_llama_config": True}
    (folder / "config.json").write_text(json.dumps(stored))


def like_gpt2(folder: Path) -> None:
    """A random model in the form of openai-community/gpt2: names without prefix, and the masks of its attention."""
    transformers = pytest.importorskip("transformers")
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)).save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64).tril() for i in range(2)}
    save_file(tensors | masks, file, {"format": "pt"})


@pytest.mark.filterwarnings("error::onward.families._keys.UnreadKeys")
@pytest.mark.parametrize(
    ("chapter", "model", "load", "make"),
    [("12", "Llama", "load_llama", like_smollm2), ("7", "GPT", "load_gpt2", like_gpt2)],
)
def test_a_folder_of_the_published_form_is_loaded(
    chapter: str, model: str, load: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    make(tmp_path)
    tokens = torch.randint(90, (2, 40))
    with torch.inference_mode():
        own = loader(chapter, model, load)(tmp_path)(tokens)
        expected = onward.load(tmp_path, dtype=torch.float32).model(tokens)
    assert own.std() > 0.05
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-4)


def test_the_llama_of_the_chapter_has_the_logits_of_stories(shared: Path) -> None:
    lm = onward.load(shared / "stories260K")
    tokens = torch.tensor([lm.tokenizer.encode("Once upon a time, there was a dog.")])
    with torch.inference_mode():
        own = loader("12", "Llama", "load_llama")(shared / "stories260K")(tokens)
        torch.testing.assert_close(own, lm.model(tokens), rtol=0, atol=1e-4)
