"""The user-defined loss given by a run's option `loss`, "module:NAME"."""

from onward.base.errors import UserError
from onward.base.own import named
from onward.training.config import RunConfig
from onward.training.step.loss import CrossEntropy, Loss, as_loss

OPTIONS = "z_loss", "label_smoothing", "loss_chunk"  # options of CrossEntropy
EXAMPLE = "name a function of (model, batch) or an onward.Loss, as in mine:focal or mine:Focal(gamma=2)"


def text_loss(config: RunConfig) -> Loss:
    """Return the loss of a pre-training run: the loss that `config.loss` names, or the cross-entropy. A class is called
    with the arguments in parentheses; a subclass of CrossEntropy also gets the options of the cross-entropy. Raises a
    UserError for a name that is not a loss, and for options that the loss does not use."""
    if not config.loss:
        return CrossEntropy.of(config)
    found, arguments = named("loss", config.loss, EXAMPLE)
    crossed = isinstance(found, type) and issubclass(found, CrossEntropy)
    if unread := [name for name in OPTIONS if getattr(config, name) and not crossed]:
        raise UserError(
            f"{unread[0]} has no effect on the loss {config.loss}, which is not an onward.training.CrossEntropy: leave "
            "it out, or make the loss a subclass"
        )
    if crossed:
        arguments = {"z_loss": config.z_loss, "label_smoothing": config.label_smoothing, "chunk": config.loss_chunk} | (
            arguments
        )
    if not callable(found) or (arguments and not isinstance(found, type)):
        raise UserError(f"loss is {config.loss!r}, which is not a class or function for a loss: {EXAMPLE}")
    try:
        return as_loss(found(**arguments) if isinstance(found, type) else found)
    except TypeError as error:
        raise UserError(f"Cannot make the loss {config.loss}: {error}") from None
