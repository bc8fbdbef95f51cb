"""Measures the speed of a model on this machine in generation and training, and the machine's limits for plans."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from onward.measuring.training import measure_training
else:
    from onward.base.public import lazily

    __getattr__, __dir__ = lazily(__name__)

__all__ = ["measure_training"]
