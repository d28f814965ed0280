"""Images in prompts: from files and `data:` URLs to rows in place of tokens' embeddings."""
