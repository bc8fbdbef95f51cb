from transformers import Ministral3Config

from support.families.llama import SIZES


def scaled(**parameters: object) -> dict[str, object]:
    given = {"rope_theta": 300.0, "llama_4_scaling_beta": 0.4, "original_max_position_embeddings": 4, **parameters}
    return {"rope_parameters": given}


CASES = {
    "yarn with mscale": Ministral3Config(
        **SIZES, head_dim=6, **scaled(rope_type="yarn", factor=4.0, mscale=1.0, mscale_all_dim=1.0)
    ),
    "other steps, window, tied": Ministral3Config(
        **SIZES,
        head_dim=10,
        sliding_window=5,
        tie_word_embeddings=True,
        **scaled(rope_type="linear", factor=4.0, original_max_position_embeddings=3, llama_4_scaling_beta=1.5),
    ),
}
