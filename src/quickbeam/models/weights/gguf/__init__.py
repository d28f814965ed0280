"""Models in `.gguf` files, as they are: their blocks, architecture, tokenizer and template."""
