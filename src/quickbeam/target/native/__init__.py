"""Native kernels for a few rows on a CPU: bfloat16 products that read their weights once, and all
that stands between them.

C++ (`simd.h`, `product.h`, `tiles.h`, `attention.h`, `program.cpp`) with a plain C interface,
compiled by `build` for each instruction set and loaded by `library`. `program` puts operations
together into passes; `reference` says in PyTorch what each of them computes.

Every sum has one order, whatever the number of rows, the tree, the pages, the batch and the number
of threads, so a row's bits depend on what it sees alone. Nothing here knows a model.
"""
