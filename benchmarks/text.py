"""The text of benchmarks, and a description of the machine."""

import platform
from pathlib import Path

import torch

SHARED = Path(__file__).parents[2] / "shared" / "data"


def shakespeare() -> list[str]:
    """Return tinyshakespeare if its file exists, otherwise the built-in corpus after printing a notice."""
    from onward.data import documents

    path = SHARED / "tinyshakespeare.txt"
    if path.exists():
        return list(documents([str(path)]))
    print("tinyshakespeare is missing: the built-in corpus is used instead, so losses are not comparable")
    return list(documents(["embedded"]))


def machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    kind = names[0] if names else platform.processor()
    flags = next((line for line in lines if line.startswith("flags")), "")
    extras = [name for name in ("avx512_bf16", "avx512_vnni", "amx_bf16") if name in flags]
    return (
        f"{kind}, {torch.get_num_threads()} threads, {' '.join(extras) or 'no bf16 units'}, torch {torch.__version__}"
    )
