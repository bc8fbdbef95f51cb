"""Models that transformers runs and Onward cannot read: the reason for each model_type. Remove a model_type from this
table when a family reads it (`tests/families/test_transformers_models.py`)."""

from collections.abc import Iterable, Mapping

from onward.base.suggestions import closest

WHY = {  # completes "Cannot read model_type X, because ..."
    "it is an encoder, whose tokens attend in both directions": (
        "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta "
        "roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xmod blip_text_model"
    ),
    "its decoder attends to the output of an encoder": (
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet trocr whisper "
        "florence2 pix2struct pix2struct_text_model pp_formulanet pp_formulanet_text t5gemma2 t5gemma2_decoder "
        "udop vision-encoder-decoder evolla"
    ),
    "it generates audio instead of text": "moshi musicgen musicgen_decoder musicgen_melody musicgen_melody_decoder",
    "its layers are conditioned on sound": "kyutai_speech_to_text voxtral_realtime_text",
    "it controls robots with a diffusion model": "pi0",
    "it generates by diffusion, not token by token": "diffusion_gemma diffusion_gemma_text",
    "it is a draft model that reads the hidden states of another model": "gemma4_assistant gemma4_unified_assistant",
    "it has image layers between its text layers": "git idefics",
    "it reads bytes through patches of varying length": "blt",
    "it uses Mamba-1, whose decay differs between channels": "falcon_mamba jamba mamba zamba",
    "its layers share the weights of one attention": "zamba2",
    "it has recurrent layers of its own kind": "recurrent_gemma rwkv xlstm minimax zaya inkling_text inkling2_text",
    "its indexer, which chooses the tokens to attend to, is not supported yet": (
        "deepseek_v4 axk2 hy_v4 dots3_note dots3_note_text minimax_m3_vl_text "
        "mistral_large4_text qwen4_exp qwen4_exp_text glm5_next_text"
    ),
    "its layers run several times, or read inner copies of the text": "hrm_text reformer xlnet",
    "its attention has experts": "jetmoe",
    "its attention and experts are chosen by products of keys": "doge",
    "each layer has two attentions, with the experts between them": "longcat_flash",
    "its scores have a bias for each range of distances": "cpmant",
    "its weights are stored in another order": "cosmos3_omni molmo2_text",
    "its residual stream and its experts are gated and normalized in another way": "muse_spark_text",
    "its windows always include the whole prompt": "unlimited_ocr_text",
    "its images are tokens of the vocabulary": "chameleon",
    "its text attends to images inside the layers": "kosmos-2 kosmos_2_text_model kosmos-2.5 kosmos_2_5_text_model",
    "its family file is missing": "bailing_hybrid ernie4_5_vl_moe_text lfm3",
}
UNREAD = {model_type: reason for reason, types in WHY.items() for model_type in types.split()}


def unknown(name: str, families: Mapping[str, str], others: Iterable[str]) -> str:
    """The message for a name that is not a release: `families` has the family of each release, and `others` are further
    names that the caller accepts."""
    if reason := UNREAD.get(name):
        return f"Cannot read {name!r}, because {reason}: onward models lists the releases that Onward reads"
    releases = [release for release, family in families.items() if name == family or release.startswith(name)]
    if len(releases) > 1:
        listed = f"onward models {name} lists its releases" if name in releases[0] else f"choose {', '.join(releases)}"
        what = "is a family" if name in families.values() else "begins the names of several releases"
        return f"{name!r} {what} and is not one release, such as {releases[0]}: {listed}"
    close = closest(name, [*others, *families])
    advice = f"did you mean {close}?" if close else "onward models lists the releases"
    return f"{name!r} is not a release that Onward knows: {advice}"
