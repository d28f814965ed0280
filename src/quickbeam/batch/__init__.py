"""Answer a file of requests into a file of answers, with a function that answers a request."""
