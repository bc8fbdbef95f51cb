"""What a user did wrong, in one sentence."""


class UserError(ValueError):
    """A mistake of the user: what is wrong, where, and what to do, in one sentence.

    The command line prints it without a traceback and exits with status 2; from Python it is a ValueError.
    """
