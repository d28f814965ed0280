"""Answer a file of requests into a file of answers. A run may be stopped at any time and continued.

`requests` reads the requests, `journal` writes the answers, and `run` passes the requests to a
function that answers them: the server's endpoints without HTTP, or replicas on Ray (`ray`).
"""
