"""Sources of candidates. Each knows the text so far, none knows the tree that its tokens end in."""
