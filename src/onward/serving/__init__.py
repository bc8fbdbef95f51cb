"""The server of `onward serve`, for use inside other programs."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from onward.serving.app import make_app
    from onward.serving.keys import Key
    from onward.serving.models import Served, load_served
    from onward.serving.request_log import RequestRecord
    from onward.serving.server import serve
    from onward.serving.server_options import EngineOptions, Listening, RequestLimits
    from onward.serving.service import Service
else:
    from onward.base.public import lazily

    __getattr__, __dir__ = lazily(__name__)

__all__ = [
    "EngineOptions",
    "Key",
    "Listening",
    "RequestLimits",
    "RequestRecord",
    "Served",
    "Service",
    "load_served",
    "make_app",
    "serve",
]
