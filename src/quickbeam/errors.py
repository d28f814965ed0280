"""Errors a user can cause. Their message names what was given, what is accepted and what to do."""


class QuickbeamError(Exception):
    """Something failed that is not the caller's input (a broken download, NaN logits). Exit code 1
    on the command line."""


class InvalidInput(QuickbeamError, ValueError):
    """The caller's input can't be used (an unknown method, a prompt beyond the context). Exit code
    2 on the command line."""
