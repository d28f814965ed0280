"""Sources of candidate tokens. They know the text so far, but not where their tokens go."""
