"""What well-known devices can compute, by their makers' data sheets."""

FLOPS = {  # dense products per second in bf16, or in fp16 where there is no bf16
    "b200": 2250e12,
    "h200": 989e12,
    "h100": 989e12,  # SXM
    "mi300x": 1307e12,
    "a100": 312e12,
    "l40s": 362e12,
    "l4": 121e12,
    "v100": 125e12,
    "t4": 65e12,
    "rtx4090": 165e12,
    "rtx3090": 71e12,
}
