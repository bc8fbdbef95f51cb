"""Measurements of a model on this machine: its speed in generation and training, and the machine for which it is
planned."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from onward.measuring.training import measure_training
else:
    from onward.base.public import lazily

    __getattr__, __dir__ = lazily(__name__)

__all__ = ["measure_training"]
