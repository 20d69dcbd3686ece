"""The one exception that means "the user can fix this"."""


class UserError(Exception):
    """Wrong input, named in one message: what is wrong, where, and the hint.

    The command line prints the text as a single line and exits with status 2, without a traceback.
    """
