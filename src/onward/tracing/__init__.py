"""Changes of activations for `onward.edit`, and the result of `onward.trace`."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from onward.tracing.calls import Location
    from onward.tracing.edit import add, clamp, mean_of, replace, scale, zero
    from onward.tracing.trace import Trace
else:
    from onward.base.public import lazily

    __getattr__, __dir__ = lazily(__name__)

__all__ = ["Location", "Trace", "add", "clamp", "mean_of", "replace", "scale", "zero"]
