"""A `Stack` becomes a list of kernel operations.

- `compiled_stack.py` makes the list, a `Program`: it embeds tokens, adds each layer, the final norm
  and the head. It packs the weights as the operations name them, and runs passes.
- `layer.py` adds the operations of a layer: what mixes tokens, then the feed-forward.
- `recurrent.py` and `experts.py` add the operations of recurrent layers, and of experts.
- `hidden_input.py` adds what a drafter's rows read besides tokens.
- `compiler.py` is what all of these add operations with: buffers, packed weights and the most usual
  pairs of operations.
- `native_model.py` is the `Model` that runs the list.

Which operations there are, and their arguments, is in `native/program.py`.
"""
