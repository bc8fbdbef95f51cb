"""The names of a layer for multi-token prediction in published models. Does not import torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PredictionLayer:
    """The names in a layer for multi-token prediction, which predicts the token after the next from the model's hidden
    state and the next token. In order: the prefix of its block, the norms of the embedding and the hidden state, the
    projection of both (concatenated in this order), and the norm before the model's head. {n} is the number of the
    model's own layers."""

    block: str
    embedding: str
    hidden: str
    projection: str
    norm: str


NUMBERED = PredictionLayer(  # DeepSeek-V3 (DeepSeek-AI 2024, section 2.2) and GLM 4.5
    *(f"model.layers.{{n}}{name}" for name in ("", ".enorm", ".hnorm", ".eh_proj", ".shared_head.norm"))
)
APART = PredictionLayer("mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
