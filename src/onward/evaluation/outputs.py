"""Computes the outputs of a model's head after sequences of tokens: rewards, values, or class scores; and their
calibration.

Shapes: S sequences, N outputs, T tokens of the longest sequence of a batch, M answers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from onward.model.decoder import Decoder, without_dropout
from onward.transforms.heads import head_of

ROWS = 32  # sequences of a batch
BINS = 10  # of confidence, from 0 to 1


@torch.inference_mode()
def outputs(model: Decoder, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Compute the outputs (S, N) of a model's head, such as its rewards or class scores, after the last token of each
    sequence of token ids, in at least fp32. Raises a UserError if the model has no head."""
    head, rows = head_of(model), []
    with without_dropout(model):
        for start in range(0, len(sequences), ROWS):
            batch = [torch.tensor(sequence) for sequence in sequences[start : start + ROWS]]
            hidden = model.hidden(pad_sequence(batch, batch_first=True).to(model.device))
            lasts = torch.tensor([len(sequence) - 1 for sequence in batch], device=model.device)
            rows.append(head(hidden[torch.arange(len(batch), device=model.device), lasts]))
    return torch.cat(rows)


def calibration_bins(confidence: Tensor, right: Tensor) -> dict[str, Tensor]:
    """Compute, for each of 10 bins of confidence, the sum over answers of confidence minus correctness. `confidence`
    has the probability that the model gives each answer, `right` is 1 for a right answer, else 0, both (M,). Returns
    {"bin/NUMBER": sum}; sums over batches, which `calibration_error` turns into one figure."""
    index = (confidence * BINS).long().clamp(max=BINS - 1)
    sums = confidence.new_zeros(BINS).index_add(0, index, confidence - right)
    return {f"bin/{i}": value for i, value in enumerate(sums.unbind())}


def calibration_error(figures: dict[str, float]) -> dict[str, float]:
    """Replace the entries of `calibration_bins` in `figures`, divided by the number of all answers, by
    "calibration_error", the expected calibration error (Guo et al. 2017): the mean gap between confidence and accuracy.
    Returns the new dict."""
    bins = [figures.pop(name) for name in list(figures) if name.startswith("bin/")]
    return figures | {"calibration_error": sum(map(abs, bins))}
