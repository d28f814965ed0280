"""Answer a file of requests into a file of answers. A run may be stopped at any time and continued.

`requests` reads the requests, `journal` writes the answers, and `run` passes the requests to a
function that answers them. `answers` makes such a function from a model in this process, `ray` from
replicas on Ray.
"""
