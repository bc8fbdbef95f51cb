"""Changes to trained models: adapters, quantization, heads, compilation, longer contexts."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from onward.transforms.compiling import compile_blocks
    from onward.transforms.extend import extended
    from onward.transforms.heads import add_head
    from onward.transforms.quantize import quantize_model, quantize_rows
    from onward.transforms.recompute import recompute_blocks
else:
    from onward.base.public import lazily

    __getattr__, __dir__ = lazily(__name__)

__all__ = ["add_head", "compile_blocks", "extended", "quantize_model", "quantize_rows", "recompute_blocks"]
