"""`pytest --device cuda`: tensors and models of the tests are on this device, tensors made by the package are not
moved."""

import torch

from onward import Decoder

from support import devices
from support.decoders import DECODERS, decoder, token_ids


def test_tensors_and_models_of_tests_are_on_the_chosen_device() -> None:
    with devices.using("meta"):
        model = decoder(DECODERS["llama"])
        made = [torch.zeros(2), torch.tensor([1.0]), token_ids(model.config)]
        parameter = torch.randn(3, requires_grad=True)
    assert {tensor.device.type for tensor in (*made, *model.parameters(), parameter)} == {"meta"}
    assert parameter.is_leaf
    assert torch.zeros(2).device == devices.device()


def test_tensors_of_the_package_stay_where_the_package_makes_them() -> None:
    with devices.using("meta"):
        model, explicit = Decoder(DECODERS["llama"]), torch.zeros(2, device="cpu")
        assert {tensor.device.type for tensor in (*model.parameters(), explicit)} == {"cpu"}
