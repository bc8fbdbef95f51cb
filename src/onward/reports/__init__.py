"""Pictures, and the records in the folders of runs."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from onward.reports.pictures.arrows import arrows
    from onward.reports.pictures.ideas import IDEAS
    from onward.reports.pictures.in_context import in_context
    from onward.reports.pictures.layer_views import attention, experts
    from onward.reports.pictures.panels import bars, cells, curves, words
    from onward.reports.pictures.picture import Panel, Picture
    from onward.reports.pictures.reading import Reading
    from onward.reports.pictures.scale import ColorScale
    from onward.reports.pictures.strategies import compare
    from onward.reports.runs.record import RunRecord, find_runs
else:
    from onward.base.public import lazily

    __getattr__, __dir__ = lazily(__name__)

__all__ = [
    "IDEAS",
    "ColorScale",
    "Panel",
    "Picture",
    "Reading",
    "RunRecord",
    "arrows",
    "attention",
    "bars",
    "cells",
    "compare",
    "curves",
    "experts",
    "find_runs",
    "in_context",
    "words",
]
