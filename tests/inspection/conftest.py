"""A small model in fp64, shared by several test files; no test changes it."""

import pytest
import torch

import onward

from support.decoders import DECODERS, decoder


@pytest.fixture(scope="module")
def model() -> onward.Decoder:
    return decoder(DECODERS["llama"], torch.float64)
