"""Preference losses equal those of TRL's trainers, if TRL is installed."""

import importlib
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import onward
from onward import Decoder, LoRA, add_lora
from onward.data import ExampleBatch
from onward.training import sequence_logprobs

from support.finetuning import base_in, base_model
from support.preferences import changed, example_batch, of


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_model(tmp_path_factory.mktemp("base"), dropout=0.3)


class Stub:
    """Onward's model with TRL's interface: log-probabilities of the tokens whose labels are not -100."""

    def __init__(self, model: Decoder) -> None:
        self.model = model

    def __call__(self, input_ids: Tensor, labels: Tensor, **_: Any) -> SimpleNamespace:
        logprobs = self.model(input_ids)[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0]
        kept = logprobs * (labels[:, 1:] != -100)
        unused = torch.zeros_like(kept)
        return SimpleNamespace(log_probs=kept, entropy=unused, mean_logits=unused, is_top1=unused.bool(), aux_loss=None)


def padded(batch: ExampleBatch, which: slice) -> dict[str, Tensor]:
    """The sequences of a batch as TRL collates them: one per row, padded on the right."""
    rows = []
    for number in range(batch.num_sequences)[which]:
        here = batch.sequences == number
        where = here & ((batch.tokens > 0) | (batch.positions > 0))
        rows.append((batch.tokens[where], torch.cat([torch.tensor([False]), batch.targets[where][:-1] >= 0])))
    pad = lambda several: torch.nn.utils.rnn.pad_sequence(several, batch_first=True)
    tokens, mask = pad([row[0] for row in rows]), pad([row[1].long() for row in rows])
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "completion_mask": mask}


def theirs(notation: str, model: Decoder, reference: Decoder, batch: ExampleBatch, beta: float) -> Tensor:
    """TRL's loss."""
    (losses, smoothing, tail), name = TRL[notation], notation.partition("(")[0]
    metrics = {mode: defaultdict[str, list[float]](list) for mode in ("train", "eval")}
    gather = SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda x: x, gather=lambda x: x)
    gather.unwrap_model = lambda x: x
    common = SimpleNamespace(
        model=model, accelerator=gather, aux_loss_enabled=False, _metrics=metrics, beta=beta, label_smoothing=smoothing
    )
    own = vars(common)
    if name in ("orpo", "simpo", "cpo"):
        found = sequence_logprobs(model, batch)
        scores = found.total if name == "cpo" else found.mean
        chosen, rejected = scores[::2], scores[1::2]
        if name == "orpo":
            from trl.experimental.orpo import ORPOTrainer

            return (-chosen - ORPOTrainer.odds_ratio_loss(common, chosen, rejected)[0]).mean()
        from trl.experimental.cpo import CPOTrainer

        own |= {"loss_type": {"cpo": "sigmoid"}.get(name, name), "simpo_gamma": 0.5, "alpha": 0.0}
        return CPOTrainer.cpo_loss(common, chosen, rejected)[0].mean()
    own |= {"precompute_ref_logps": False, "ref_model": Stub(reference), "args": SimpleNamespace()}
    own["args"].gradient_checkpointing_kwargs = None
    own |= {"_total_train_tokens": 0, "_tp_size": 1, "use_weighting": False}
    policy = Stub(model)
    if name == "kto":
        import trl.trainer.kto_trainer as module

        own |= {"loss_type": "kto", "calculate_KL": True, "desirable_weight": 1.0, "undesirable_weight": 1.0}
        inputs: dict[str, Any] = padded(batch, slice(0, None, 2)) | {"label": batch.numbers["label"].bool()}
        inputs |= {f"KL_{key}": value for key, value in padded(batch, slice(1, None, 2)).items()}
        common._compute_kl_logps = lambda m, b: module.KTOTrainer._compute_kl_logps(common, m, b)
        return call(module.KTOTrainer._compute_loss, common, policy, inputs)
    import trl.trainer.dpo_trainer as module

    own |= {"ld_alpha": tail, "f_divergence_type": "reverse_kl"}
    own |= {"loss_types": [*losses], "loss_weights": [*losses.values()]}
    own["args"].discopop_tau = 0.05
    both = padded(batch, slice(None))
    inputs = {key: torch.cat([value[::2], value[1::2]]) for key, value in both.items()}
    return call(module.DPOTrainer._compute_loss, common, policy, inputs)


def call(compute: Any, trainer: Any, policy: Stub, inputs: dict[str, Any]) -> Tensor:
    """The loss from a method of a TRL trainer."""
    module: Any = importlib.import_module(compute.__module__)
    module.disable_gradient_checkpointing = lambda *_: nullcontext()
    return compute(trainer, policy, inputs, False)


TRL: dict[str, tuple[dict[str, float], float, float | None]] = {  # losses of DPOTrainer, label_smoothing and ld_alpha
    "dpo": ({"sigmoid": 1.0}, 0.0, None),
    "dpo(tail=0.4)": ({"sigmoid": 1.0}, 0.0, 0.4),
    "dpo(normalized=true)": ({"sigmoid_norm": 1.0}, 0.0, None),
    "robust(label_smoothing=0.1)": ({"robust": 1.0}, 0.1, None),
    "hinge": ({"hinge": 1.0}, 0.0, None),
    "ipo": ({"ipo": 1.0}, 0.0, None),
    "exo(label_smoothing=0.1)": ({"exo_pair": 1.0}, 0.1, None),
    "nca": ({"nca_pair": 1.0}, 0.0, None),
    "bco": ({"bco_pair": 1.0}, 0.0, None),
    "sppo": ({"sppo_hard": 1.0}, 0.0, None),
    "apo": ({"apo_zero": 1.0}, 0.0, None),
    "apo(variant=down)": ({"apo_down": 1.0}, 0.0, None),
    "discopop": ({"discopop": 1.0}, 0.0, None),
    "dpo + 0.3 * nca - 0.1 * hinge": ({"sigmoid": 1.0, "nca_pair": 0.3, "hinge": -0.1}, 0.0, None),
    "simpo(label_smoothing=0.1)": ({}, 0.1, None),
    "cpo(label_smoothing=0.1)": ({}, 0.1, None),
    "orpo": ({}, 0.0, None),
    "kto": ({}, 0.0, None),
}


@pytest.mark.long
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("name", TRL)
def test_loss_and_gradient_equal_those_of_trl(name: str, adapter: bool, base: Path) -> None:
    pytest.importorskip("trl", reason="needs TRL: pip install trl")
    batch, reference = example_batch("kto" if name == "kto" else "dpo"), onward.load(base).model.double()
    model = (onward.load(base).model if adapter else changed(base)).eval().double()
    if adapter:
        add_lora(model, LoRA(rank=2))
        torch.manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += torch.randn_like(parameter) * 0.1
    trained = [p for p in model.parameters() if p.requires_grad]
    own = of(name).loss(replace(base_in(base), load=lambda _: onward.load(base).model.double()))
    losses = [own(model, batch)[0] / batch.divisor, theirs(name, model, reference, batch, 0.3)]
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-6, rel=1e-6)
    ours, wanted = (torch.autograd.grad(loss, trained) for loss in losses)
    for got, other in zip(ours, wanted):
        assert (got - other).abs().max() <= 1e-5 * other.abs().max() + 1e-7
