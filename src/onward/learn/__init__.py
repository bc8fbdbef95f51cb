"""The interactive figures of the course."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from onward.learn.interactive.cache import cache_memory
    from onward.learn.interactive.figure import InteractiveFigure
    from onward.learn.interactive.masks import mask_grid
    from onward.learn.interactive.rotary import rotary_pairs
    from onward.learn.interactive.samplers import samplers
    from onward.learn.interactive.scaling import loss_surface
    from onward.learn.interactive.stepper import stepper
else:
    from onward.base.public import lazily

    __getattr__, __dir__ = lazily(__name__)

__all__ = [
    "InteractiveFigure",
    "cache_memory",
    "loss_surface",
    "mask_grid",
    "rotary_pairs",
    "samplers",
    "stepper",
]
