"""A file of requests answered into a file of answers, which may be broken off at any moment and
gone on with.

`requests` reads the one, `journal` writes the other, `run` goes from one to the other through
whatever answers (`answers`: an engine here).
"""
