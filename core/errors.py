"""The one exception that is meant for the person at the keyboard."""


class UserError(ValueError):
    """Something that the user can put right: what is wrong, where, and what would be right, in one line.

    The command line prints it without a traceback and ends with exit code 2.
    """
