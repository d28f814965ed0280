"""The package's exceptions. A message names what was given, what is accepted and what to do."""


class QuickbeamError(Exception):
    """Something failed that is not the caller's input, such as a broken download or NaN logits.

    The command line exits with code 1.
    """


class InvalidInput(QuickbeamError, ValueError):
    """The caller's input can't be used, such as an unknown method or a prompt beyond the context.

    The command line exits with code 2.
    """
