"""Compute the outputs of a model's head after sequences of tokens: rewards, values, or class scores; and their
calibration.

Shapes: S sequences, N outputs, M answers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from onward.model.decoder import Decoder, without_dropout
from onward.transforms.heads import head_of

ROWS = 32  # number of sequences in a batch
BINS = 10  # number of bins of confidence, from 0 to 1


@torch.inference_mode()
def outputs(model: Decoder, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Outputs (S, N) of a model's head after the last token of each sequence, in at least fp32."""
    head, rows = head_of(model), []
    with without_dropout(model):
        for start in range(0, len(sequences), ROWS):
            batch = [torch.tensor(sequence) for sequence in sequences[start : start + ROWS]]
            hidden = model.hidden(pad_sequence(batch, batch_first=True).to(model.device))
            lasts = torch.tensor([len(sequence) - 1 for sequence in batch], device=model.device)
            rows.append(head(hidden[torch.arange(len(batch), device=model.device), lasts]))
    return torch.cat(rows)


def calibration_bins(confidence: Tensor, right: Tensor) -> dict[str, Tensor]:
    """Return the sum of confidence minus correctness over the answers in each bin of confidence, as {"bin/NUMBER":
    sum}. `confidence` (M,) is the model's probability of each answer, `right` (M,) is 1 for a right answer, else 0.
    `calibration_error` converts the sums over all batches to a single figure."""
    index = (confidence * BINS).long().clamp(max=BINS - 1)
    sums = confidence.new_zeros(BINS).index_add(0, index, confidence - right)
    return {f"bin/{i}": value for i, value in enumerate(sums.unbind())}


def calibration_error(figures: dict[str, float]) -> dict[str, float]:
    """Replace the bins, which were divided by the total number of answers, by the expected calibration error (Guo et
    al. 2017): the mean gap between confidence and accuracy."""
    bins = [figures.pop(name) for name in list(figures) if name.startswith("bin/")]
    return figures | {"calibration_error": sum(map(abs, bins))}
