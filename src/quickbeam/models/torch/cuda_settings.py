"""Settings of PyTorch's products on CUDA under which a row's bits are most often the same."""

from __future__ import annotations

import os

import torch

# A library without workspace for partial sums divides no sum among several programs (split-K), and
# shares no workspace between streams.
WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}


def fix_sums() -> None:
    """Have products add in float32 and in one way, for the whole process.

    Products in float32 keep all bits (no TF32). Products in 16 bits add in float32. No kernel is
    selected by measuring. Workspaces that the user has set stay as they are. Ours take effect only
    if the library has not been used before.
    """
    for name, value in WORKSPACES.items():
        os.environ.setdefault(name, value)
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = False
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False
    if torch.cuda.is_available():
        torch.cuda.tunable.enable(False)
