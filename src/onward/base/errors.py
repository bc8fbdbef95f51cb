"""The error for mistakes of the user."""


class UserError(ValueError):
    """A mistake of the user. The message is one sentence that states the mistake, its place, and the remedy.

    The command line prints it without a traceback and exits with status 2; from Python it is a ValueError.
    """
