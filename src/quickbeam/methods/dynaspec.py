"""DynaSpec (2510.13847): the drafter scores the part of its vocabulary that the context calls for.

In the paper's order, with the files where each step is:

1. *Clusters*, offline. The paper divides the vocabulary by spherical k-means on the rows of the
   drafter's head. Here the tokens of a cluster follow the same texts (`pifa` in `train/router.py`).
   Rows of a cluster lie together (`drafters/shortlist/layout.py`). The most frequent tokens are a
   block of their own that is always scored.
2. *Router*. A two-layer MLP reads the hidden state and the embedding of the token, which are known
   before the drafter's layer has run, and scores the clusters (`drafters/shortlist/router.py`).
3. *Top-k*. The best clusters are scored (`Shortlist.choose`). The paper takes fewer at deeper
   positions, since early misses compound. Here a cluster is worth its probabilities summed over all
   nodes of a call, so a call with few nodes has more room for each.
4. *Head*. Logits of these rows alone (`drafters/shortlist/native.py`), and of tokens that prompt
   and answer hold. The drafter's distribution is their softmax; any other token has probability 0.
5. *Verification* is over the whole vocabulary. It uses the same truncated distribution, so the
   answer is exact. A token that was not scored can't be accepted, which is all that is lost.

The tree is DySpec's. `--vocab` chooses other parts of the vocabulary for any method.
"""

from __future__ import annotations

from quickbeam.drafters.base import Drafter
from quickbeam.methods.dyspec import DySpec


def dynaspec(drafter: Drafter) -> DySpec:
    """Return DySpec's method. The router is the drafter's (`Preset.vocab`)."""
    return DySpec(drafter)
