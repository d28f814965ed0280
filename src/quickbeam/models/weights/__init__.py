"""A model's weights: from its files to what the kernels' products read.

The terms, in the order in which a number passes through them:

- **tensor**: an array as a file stores it, by the file's name for it (`tensor_files.py`).
- **source** of a parameter: which tensors of the files hold it, and how: as it is, one expert at a
  time, or in few bits (`sources.py`, `prequantised.py`).
- **parameter**: an array of the model, by the name that transformers' causal language model gives
  it (`parameters.py`). A `Parameters` object gives them by name and row: of a folder
  (`checkpoint.py`), of a folder with an adapter merged into it (`adapters.py`), of a `.gguf` file
  (`gguf/`), or of a model of transformers. `shapes.py` compares their shapes with what the
  configuration says.
- **weight**: a parameter that a product reads, `[outputs, inputs]`: dense, or `BlockRows`, whose
  few bits stay as a file's blocks have them. A `Linear` stacks rows of several weights.
- **packed weight**: a weight in the kernels' layout (`native/quantised.py`). `packing.py` packs all
  weights of a stack, one after the other. `formats.py` says in which formats that can be.
- **packed file**: the bytes of all packed weights, kept for the next load (`packed_file.py`).
- **weight part**: the bytes of a packed weight that one operation reads, and **weight group**: the
  parts that are read at once where memory holds only some (`disk.py`, by way of `file_reader.py`).
"""
