"""The keys of a config.json that a family has read, and the keys that are harmless. Does not import torch."""

import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from onward.families._rope_keys import conflicts, unknown_keys

HARMLESS = re.compile(
    # the file itself
    r"architectures|model_type|(torch_)?dtype|transformers_version|quantization_config|auto_map|tokenizer_class"
    r"|_name_or_path|name|prefix|unsloth_\w+|torchscript|use_bfloat16"
    # text: tokens, generation, classification
    r"|\w+_token_id|tie_word_embeddings|do_sample|(min|max)_length|num_beams|num_beam_groups|num_return_sequences"
    r"|temperature|top_[kp]|typical_p|\w+_penalty|use_cache|cache_implementation|summary_\w+|task_specific_params"
    r"|problem_type|predict_special_tokens|id2label|label2id|return_dict\w*|output_\w+"
    # training and computation
    r"|\w*initializer_\w+|init_(std|device|config)|\w*dropout\w*|\w*_pdrop|layerdrop|gradient_checkpointing|\w*aux_loss\w*"
    r"|seq_aux|num_nextn_predict_layers|router_jitter_noise|pretraining_tp|ep_size|chunk_size_feed_forward|is_decoder"
    r"|learned_pos_emb|embedding_fraction|_?attn_implementation\w*|(scale_)?attention_softmax_in_fp32"
    r"|reorder_and_upcast_attn|slow_but_exact|\w+_fusion|verbose|(mamba_)?chunk_size|time_step_(min|max|floor|rank)"
    r"|rescale_prenorm_residual|residual_in_fp32|num_logits_to_keep|use_mamba_kernels|mamba_ssm_(cache_)?dtype"
    r"|(num_|use_)?mtp(_\w+)?|moe_shared_expert_overlap|z_loss_coefficient|linear_(a_log|dt)_\w+"
    # repeated by other keys
    r"|max_sequence_length|seq_length|n_ctx|qk_head_dim|initial_context_length|experts_per_token"
    r"|no_rope_layer_interval|_sliding_window_pattern|is_llama_config"
)

ROPE = "rope_parameters", "rope_scaling"
NOTHING: tuple[Any, ...] = (None, False, [], {}, "")


def is_nothing(value: Any) -> bool:
    """Whether a value of an unread key is equivalent to a missing key; this includes a list of "full_attention"."""
    return value in NOTHING or (isinstance(value, list) and {str(entry) for entry in value} == {"full_attention"})


class RecordedKeys(Mapping[str, Any]):
    """A config.json that records which keys a family has read, to warn of unread keys."""

    def __init__(self, hf: Mapping[str, Any]) -> None:
        self.hf, self.seen = hf, set[str]()

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return self.hf[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.hf)

    def __len__(self) -> int:
        return len(self.hf)

    def unread(self) -> list[str]:
        """The keys that were not read, unless they are empty or known to be harmless."""
        unread = [key for key, value in self.hf.items() if key not in self.seen and not is_nothing(value)]
        return [key for key in unread if not HARMLESS.fullmatch(key)]

    def warn(self) -> None:
        """Warn of unread keys, and of a rope_scaling that differs from rope_parameters."""
        odd = self.unread()
        if tables := [table for key in ROPE if key in self.seen and (table := self.hf.get(key))]:
            odd += unknown_keys({key: self.hf.get(key) or {} for key in ROPE})
        if odd:
            message = f"config.json has keys that Onward does not know and ignores: {', '.join(map(repr, odd))}"
            warnings.warn(message, UnreadKeys, stacklevel=1)  # always from this line, so that it is shown once
        if len(tables) == 2 and (differing := " and ".join(conflicts(self.hf))):
            warnings.warn(
                f"config.json has a rope_scaling that differs from rope_parameters in {differing}: Onward takes "
                "rope_scaling, and rope_theta and partial_rotary_factor from rope_parameters; remove the wrong one",
                UnreadKeys,
                stacklevel=1,
            )


class UnreadKeys(UserWarning):
    """Warns of keys that Onward does not know: the model may differ from the published model."""
