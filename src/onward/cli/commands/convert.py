"""onward convert: a model in another format."""

import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import ClassVar, Literal

from onward.base.errors import UserError
from onward.base.fields import counted
from onward.base.files import atomic_write
from onward.cli.shared.options import parse
from onward.cli.shared.output import print_json, print_next
from onward.hub.folder import locate
from onward.hub.names import size_of

ABOUT = """\
Write a model in another format: GGUF for llama.cpp, ollama and LM Studio, or a Hugging Face folder.

examples:
  onward convert runs/mybook mybook.gguf                    a file that ends in .gguf is GGUF
  onward convert runs/mybook mybook-q8.gguf --dtype q8_0 --modelfile
  onward convert mybook.gguf folder                         back to a folder that transformers and vLLM load
  onward convert org/name folder --dtype bf16               a model on the hub
  onward convert runs/mybook mybook.gguf --dry-run          check the conversion without writing a file
  onward convert runs/lora adapter.gguf                     a LoRA adapter for llama.cpp and the base's GGUF file
  onward convert org/old folder --from-bin                  an old release with pickles instead of safetensors

A GGUF file is written only if llama.cpp computes the same function; otherwise the error names the unsupported part of
the model. --accept writes the file despite a known difference of llama.cpp: epsilon (the same epsilon for all norms:
GLM-4.7-Flash, GLM-5), gelu (the tanh approximation of GELU: Pythia, Falcon, MPT), phimoe (simpler norms and router:
Phi-3.5-MoE), ramp (a rounded ramp of YaRN: GPT-OSS), step (no minimum step size: Nemotron-H) or window (no sliding
window: the first Mistral).
"""
FILES = (".safetensors", ".ggml", ".bin", ".pt", ".pth", ".onnx")  # file formats that this command does not write
Dtype = Literal["", "f32", "f16", "bf16", "q8_0", "q4_0", "q4_k_m", "q5_k_m", "q6_k"]


@dataclass(frozen=True)
class Options:
    """The options of `onward convert`, which writes a model in another format."""

    positional: ClassVar[tuple[str, ...]] = ("model", "out")
    reads: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "gguf": ("accept", "modelfile", "importance"),
        "hf": ("shard_bytes",),
    }
    model: str  # folder of the model, a GGUF file, or a name on the hub
    out: str  # file to write, which ends in .gguf, or a new folder
    dtype: Dtype = ""  # dtype of the weights; default: that of the model
    importance: str = ""  # text file on which the importance of weights is measured, for q4_k_m, q5_k_m and q6_k
    to: Literal["", "gguf", "hf", "single"] = ""  # default: gguf if OUT ends in .gguf, else hf; single: one weight file
    accept: tuple[Literal["epsilon", "gelu", "phimoe", "ramp", "step", "window"], ...] = ()  # differences to accept
    shard_bytes: float = 5e9  # maximum number of bytes in each weight file of a folder
    from_bin: bool = False  # read pytorch_model.bin, a pickle: only its tensors, in a process with limited memory
    modelfile: bool = False  # write a Modelfile for ollama next to the GGUF file
    dry_run: bool = False  # print the planned output and any information that would be lost, but write nothing
    revision: str = ""  # branch, tag or commit of a model on the hub
    json: bool = False  # print the result as JSON

    @property
    def view(self) -> str:
        return self.to or ("gguf" if self.out.endswith(".gguf") else "hf")


def main(argv: Sequence[str]) -> None:
    options = parse(Options, argv, prog="onward convert", about=ABOUT)
    out, gguf = Path(options.out), options.view == "gguf"
    if gguf and out.is_dir():
        raise UserError(f"{out} is a folder: name the file to write, such as {out / 'model.gguf'}")
    if gguf and out.exists() and os.path.exists(options.model) and out.samefile(options.model):
        raise UserError(f"{out} is the model itself, which would be lost: name another file")
    if not gguf and not options.to and out.suffix in FILES:
        raise UserError(f"{out} is the name of a file: name a new folder, or a file that ends in .gguf")
    if not gguf and out.exists():
        raise UserError(f"{out} exists already: name a new folder, or a file that ends in .gguf")
    if not gguf and options.dtype.startswith("q"):
        raise UserError(f"dtype is {options.dtype}, which only GGUF has: name a file that ends in .gguf")
    import torch

    import onward
    from onward.checkpoint.eagle import is_eagle
    from onward.checkpoint.gguf.convert import check_importance, losses, plan, write_model
    from onward.checkpoint.gguf.header import is_gguf
    from onward.checkpoint.gguf.lora import write_adapter
    from onward.checkpoint.gguf.modelfile import modelfile
    from onward.checkpoint.peft.bases import base_folder
    from onward.checkpoint.pickles import as_safetensors
    from onward.checkpoint.weights import DTYPE_NAMES
    from onward.cli.shared.progress import progress_bars
    from onward.model.adapters import adapter_names

    if gguf and out.exists() and not is_gguf(out):
        raise UserError(f"{out} exists and is no GGUF file, so it is not replaced: name another file, or remove it")
    dtypes = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    dtype = None if gguf else dtypes.get(options.dtype)
    if options.from_bin:
        with as_safetensors(locate(options.model, options.revision, only="pickles"), out.parent) as folder:
            if is_eagle(folder):
                keep_draft(folder, options)
                return
            lm = onward.load(folder, dtype, "cpu")  # the weights stay memory-mapped when the folder is removed
    else:
        lm = onward.load(options.model, dtype, "cpu", revision=options.revision)
    weights, lost = list(lm.model.parameters()), list[str]()
    size, tensors = sum(weight.nbytes for weight in weights), len(weights)
    result: dict[str, object] = {"out": str(out), "dtype": DTYPE_NAMES[weights[0].dtype].lower()}
    family, adapters = str(lm.hf.get("model_type", "")), adapter_names(lm.model)
    if gguf and adapters:
        own = {"dtype": options.dtype, "importance": options.importance, "accept": options.accept}
        if given := next((name for name, value in own.items() if value), None):
            raise UserError(
                f"--{given} does not apply to {options.model}, an adapter, which is written in f32: leave it out"
            )
        written = write_adapter(lm.model, out, adapters[0], family, out.stem, dry=options.dry_run)
        size, tensors = sum(own.nbytes for own in written.values()), len(written)
        result |= {"dtype": "f32", "adapter": adapters[0]}
    elif gguf:
        check_importance(options.dtype, options.importance)
        planned = plan(lm.model, lm.tokenizer, options.dtype.upper(), out.stem, family, options.accept)
        size, tensors = planned.nbytes, len(planned.outlines)
        result |= {"architecture": planned.architecture.name, "dtype": options.dtype or result["dtype"]}
        lost = losses(lm.model, lm.tokenizer, planned)
        tokens = lm.text().encode(text_of(Path(options.importance))) if options.importance else ()
        if not options.dry_run:
            with progress_bars() as progress:
                write_model(lm.model, planned, out, lambda done: progress(f"writing {out.name}", done, size), tokens)
    elif not options.dry_run:
        onward.save(lm, out, shard_bytes=float("inf") if options.to == "single" else options.shard_bytes)
    elif not options.from_bin:
        lost = roundings(locate(options.model, options.revision), DTYPE_NAMES[lm.model.dtype])
    if options.modelfile and not options.dry_run:
        base = Path(f"{base_folder(Path(options.model)).name}.gguf") if adapters else out
        with atomic_write(out.parent / "Modelfile") as new:
            new.write_text(modelfile(base, lm.model.config, lm.tokenizer, out if adapters else None), encoding="utf-8")
    if options.json:
        print_json(result | {"bytes": size, "tensors": tensors} | ({"lost": lost} if options.dry_run else {}))
        return
    verb = "would have" if options.dry_run else "has"
    kind = f", for {result['architecture']} of llama.cpp" if "architecture" in result else ""
    if adapters and gguf:
        kind = ": an adapter, which llama.cpp applies to the GGUF file of its base"
    print(f"{out} {verb} {tensors} tensors, {result['dtype']}, {size_of(size)}{kind}")
    if options.dry_run:
        print(f"lost: {'; '.join(lost) or 'nothing'}")
    elif gguf and adapters:
        base = base_folder(Path(options.model))
        print_next(f"onward convert {quote(str(base))} {quote(str(out.parent / base.name))}.gguf")
    else:
        print_next(f'onward generate {quote(str(out))} "Once upon"')


def keep_draft(folder: Path, options: Options) -> None:
    """Keep a converted EAGLE-3 draft, which is in a temporary folder, as it is."""
    plain = Options(options.model, options.out)
    of_models = "to", "dtype", "shard_bytes", "dry_run"
    if given := next((name for name in of_models if getattr(options, name) != getattr(plain, name)), None):
        raise UserError(
            f"--{given.replace('_', '-')} does not apply to {options.model}, an EAGLE-3 draft: leave it out"
        )
    if options.view == "gguf":
        raise UserError(f"Cannot write {options.model} as GGUF, because it is an EAGLE-3 draft: name a new folder")
    shutil.copytree(folder, options.out)
    if options.json:
        print_json({"out": options.out})
    else:
        print(f"{options.out} has the tensors of an EAGLE-3 draft")
        print_next(f'onward generate MODEL "Once upon" --draft {quote(options.out)}')


def roundings(path: Path, dtype: str) -> list[str]:
    """Describe the rounding in a conversion to `dtype` (F32, F16 or BF16), such as "2 tensors rounded from F32 to
    F16"."""
    from onward.checkpoint.load import open_source

    stored = open_source(path).tensor_types()
    exact = {dtype} if dtype != "F32" else {*stored} - {"F64"}
    counts = Counter(kind for kind in stored if kind not in exact)
    return [f"{counted(number, 'tensor')} rounded from {kind} to {dtype}" for kind, number in counts.items()]


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"Cannot read the text {path} of --importance ({error}): name a text file in UTF-8") from None
