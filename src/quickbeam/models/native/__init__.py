"""Native kernels for a few rows on a CPU.

Products read their weights once, and kernels do all operations between products, too. The kernels
are written in C++ (`program.cpp` and its headers) with a plain C interface. `build` compiles them
for each instruction set, and `library` loads them. `program` puts operations together into passes.
`tests/reference.py` says in PyTorch what each operation computes.

Every sum has one order, whatever the number of rows, the tree, the pages, the batch and the number
of threads. So the bits of a row's result depend only on what the row sees. Nothing here knows a
model.
"""
