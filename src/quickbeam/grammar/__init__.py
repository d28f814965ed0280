"""Answers that follow a grammar, and the masks that it sets along a draft tree."""
