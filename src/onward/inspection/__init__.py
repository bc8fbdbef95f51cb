"""Analyses of a trained model: its layers, heads, units, features and tokens."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from onward.inspection.attribution import logit_attribution
    from onward.inspection.features import ReconstructionLoss, SparseAutoencoder, autoencoder_of, feature_effect
    from onward.inspection.fitting import fit, windows_of
    from onward.inspection.head_maps import attention_maps, head_scores
    from onward.inspection.heads import head_roles, repeated_tokens, role_curve
    from onward.inspection.layers import router_load, units
    from onward.inspection.lens import LensLoss, TunedLens, logit_lens
    from onward.inspection.patching import activation_patching, logit_difference
    from onward.inspection.tokens import loss_by_position, sampling_steps, score_alternatives, token_statistics
else:
    from onward.base.public import lazily

    __getattr__, __dir__ = lazily(__name__)

__all__ = [
    "LensLoss",
    "ReconstructionLoss",
    "SparseAutoencoder",
    "TunedLens",
    "activation_patching",
    "attention_maps",
    "autoencoder_of",
    "feature_effect",
    "fit",
    "head_roles",
    "head_scores",
    "logit_attribution",
    "logit_difference",
    "logit_lens",
    "loss_by_position",
    "repeated_tokens",
    "role_curve",
    "router_load",
    "sampling_steps",
    "score_alternatives",
    "token_statistics",
    "units",
    "windows_of",
]
