"""Answer a file of requests into a file of answers, with the server's endpoints or with Ray."""
