"""The back end in plain PyTorch: runs a `Stack` on any device, and shows what the kernels compute.

Products are in the model's number format. All else is in float32: the residual stream, norms,
angles, states, and what activations and gates give.
"""
