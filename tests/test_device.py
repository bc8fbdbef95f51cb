"""Devices by name, and one sentence for a missing device."""

import pytest
import torch

from onward import UserError
from onward.base.device import choose_device


@pytest.mark.parametrize(
    ("name", "gpus", "sentence"),
    [
        ("cuda", 0, "device is 'cuda': no GPU found"),
        ("cuda:1", 0, "device is 'cuda:1': no GPU found"),
        ("cuda:2", 2, "this machine has only cuda:0 to cuda:1"),
        ("cud", 0, "device is 'cud': choose auto, cpu, cuda or mps"),
        ("meta", 0, "device 'meta' cannot be used here"),
        ("mps", 0, "no Apple GPU found"),
    ],
)
def test_device_that_is_not_there_is_one_sentence(
    name: str, gpus: int, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UserError, match=sentence) as error:
        choose_device(name)
    assert "\n" not in str(error.value)


def test_devices_are_found_by_name_or_chosen() -> None:
    assert choose_device("cpu") == choose_device(torch.device("cpu")) == torch.device("cpu")
    assert choose_device().type == choose_device("auto").type
