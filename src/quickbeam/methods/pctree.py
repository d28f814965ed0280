"""PCTree (2608.02123): a tree over a block drafter whose distributions know the parent.

In the paper's order:

1. One pass of the drafter gives U_d, the logits of each depth d.
2. Depth by depth, log softmax(U_d + bias(parent)) for all parents of the frontier at once; the k
   likeliest tokens after each are its children.
3. The frontier is the k children of the depth whose paths are likeliest.
4. The tree is the likeliest paths of all depths. Of equal ones the shallower goes first.

Steps 2 to 4 are EAGLE-2's expansion and reranking. What is new is step 1: no further pass of the
drafter (`drafters/block.py`).
"""

from __future__ import annotations

from quickbeam.drafters.base import Drafter
from quickbeam.methods.eagle2 import Eagle2

WIDTH = 4  # k: most of the gain comes with 2, none with more than 4
DEEPEST = 16  # the longest published blocks


def pctree(drafter: Drafter) -> Eagle2:
    """Return EAGLE-2's search with PCTree's width, as deep as a block is long."""
    return Eagle2(drafter, WIDTH, DEEPEST)
