"""An OpenAI-compatible server, whose packages come with the extra `serve`."""
