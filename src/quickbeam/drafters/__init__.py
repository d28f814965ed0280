"""Sources of candidate tokens. They know the text so far, but not the tree that their tokens go
into."""
