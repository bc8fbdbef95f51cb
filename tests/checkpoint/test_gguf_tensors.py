"""Quantized GGUF files whose tensors have changed shapes or types load, or are refused in one sentence."""

import math
import random
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import onward
from onward import UserError
from onward.checkpoint.gguf.blocks import CODES, TYPES
from onward.checkpoint.gguf.header import Header, read_header
from onward.checkpoint.gguf.tensors import rows
from onward.checkpoint.gguf.writer import ALIGNMENT, header_of, text
from onward.checkpoint.load import load_model

from support.decoders import decoder
from support.gguf import small
from support.limits import limited

ROOM = 200 << 20
MOST = 1 << 22  # maximum number of tensor bytes in a case
QUANTIZED = [CODES[name] for name, kind in CODES.items() if TYPES[kind].dequantize]
SIZES = [0, 0, 1, 2, 3, 32, 256, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
Infos = dict[str, tuple[list[int], int]]  # name -> shape, type


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> Header:
    """The header of a model whose rows divide into blocks of every type."""
    path = tmp_path_factory.mktemp("gguf") / "x.gguf"
    config = small(d_model=256, d_ff=256, n_layers=1, n_heads=2)
    onward.save(onward.LanguageModel(decoder(config), onward.train_tokenizer("char", ["abc"])), path)
    return read_header(path)


def write(path: Path, header: Header, infos: Infos, draw: random.Random) -> Path:
    """A file with the keys of a header and these tensors, filled with random bytes."""
    table, start = b"", 0
    for name, (shape, code) in infos.items():
        table += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        table += struct.pack("<IQ", code, start)
        nbytes = math.prod(shape) // TYPES[code].numbers * TYPES[code].bytes
        start += -(-min(nbytes, MOST) // ALIGNMENT) * ALIGNMENT
    content = header_of(header.keys, len(infos)) + table
    path.write_bytes(content + bytes(-len(content) % ALIGNMENT) + draw.randbytes(min(start, MOST)))
    return path


def quantized(header: Header, draw: random.Random) -> Infos:
    """The tensors of a header with matrices of random types."""
    return {
        name: (list(info.shape), draw.choice(QUANTIZED) if len(info.shape) > 1 else CODES["F32"])
        for name, info in header.tensors.items()
    }


def changed(infos: Infos, draw: random.Random) -> Infos:
    """The tensors with up to three sizes, shapes or types changed."""
    infos = dict(infos)
    for _ in range(draw.randint(1, 3)):
        name = draw.choice([*infos])
        shape, code = list(infos[name][0]), infos[name][1]
        match draw.randrange(4):
            case 0:
                code = draw.choice([*TYPES])
            case 1:
                shape = [draw.choice(SIZES) for _ in range(draw.randrange(5))]
            case _ if shape:
                shape[draw.randrange(len(shape))] = draw.choice(SIZES)
        infos[name] = shape, code
    return infos


@pytest.mark.fuzzer
@pytest.mark.parametrize("count", [60, pytest.param(6000, marks=pytest.mark.long)])
def test_changed_tensors_work_or_are_refused_by_file(count: int, header: Header, tmp_path: Path) -> None:
    failures = list[Any]()
    for seed in range(count):
        draw = random.Random(seed)
        path = write(tmp_path / "changed.gguf", header, changed(quantized(header, draw), draw), draw)
        try:
            with limited(5, ROOM), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # random bytes may give non-finite values
                load_model(path, allow_nonfinite=True)
        except UserError as error:
            if "\n" in str(error) or "changed.gguf" not in str(error):
                failures.append((seed, str(error)))
        except Exception as error:
            failures.append((seed, repr(error)))
    assert not failures


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_matrix_without_rows_is_refused(kind: str, header: Header, tmp_path: Path) -> None:
    draw = random.Random(0)
    infos = quantized(header, draw) | {"blk.0.attn_q.weight": ([0, 256], CODES[kind])}
    with pytest.raises(UserError, match=r"attn_q\.weight of \[0, 256\] has no numbers"):
        load_model(write(tmp_path / "x.gguf", header, infos, draw))


@pytest.mark.parametrize("code", QUANTIZED)
def test_quantized_vector_is_read_in_any_pieces(code: int, header: Header, tmp_path: Path) -> None:
    draw = random.Random(0)
    infos = quantized(header, draw) | {"output_norm.weight": ([256], code)}
    info = read_header(write(tmp_path / "x.gguf", header, infos, draw)).tensors["output_norm.weight"]
    raw = np.fromfile(info.path, np.uint8, info.nbytes, offset=info.offset)
    whole = info.type.decode(raw)
    found = torch.cat([rows(info, 0.0, start, start + 50) for start in range(0, 256, 50)])
    torch.testing.assert_close(found, whole, rtol=0, atol=0, equal_nan=True)
