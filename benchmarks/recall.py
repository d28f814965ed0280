"""How often the token that is wanted of a drafter would be scored, by ways to choose as many rows.

    python benchmarks/recall.py --drafter FOLDER --rows 1475,2949,6144,12288

FOLDER is one that `quickbeam train` left, with its text and shortlist. At each place of text that
the model wrote itself the wanted token is the target's likeliest one. Routers are trained on four
conversations of five; places of the fifth are counted. "Wanted" are clusters of tokens wanted
in the same places (PIFA), "head" clusters of alike rows of the head. "Root" asks the router once a
tree, the others at every place. The figure is the recall with the context's tokens beside; the JSON
has it without them, too (`alone`), and of what the drafter gets right (`right`).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import torch

from common import arguments, finish, numbers, script
from quickbeam.drafters.shortlist.artefact import Artefact
from quickbeam.errors import InvalidInput
from quickbeam.train.places import Places, collect_places
from quickbeam.train.shortlists import DrafterFolder
from quickbeam.train.wanted import (
    Clusters,
    Found,
    Teaching,
    halved,
    label_features,
    of_router,
    roots,
    routed,
    score,
    teach,
)

HELD_OUT = 5  # one in this many conversations is counted
# clusters of what, tokens of a cluster, and whether the router learns only what the context lacks
WAYS = (("wanted", 16, True), ("wanted", 64, True), ("wanted", 8, True), ("head", 16, True))
WAYS += (("head", 512, False),)  # the paper's kind
RANKS = (64, 128)  # of scorers of single tokens, from the state that the drafter's head reads


class Trial:
    """What all ways to choose share: places to learn from, places to count, sizes."""

    def __init__(self, given: Namespace) -> None:
        out = Path(given.drafter)
        self.artefact, self.folder = Artefact.load(out), DrafterFolder(given.model, out)
        self.sizes, self.listed = [int(one) for one in numbers(given.rows)], given.listed
        self.train, self.held = (
            self._places(given, count, own)
            for count, own in ((given.train, False), (given.held, True))
        )
        self.folder.to_cpu()
        ranking = self.artefact.ranking
        self.rank = torch.empty_like(ranking).index_copy_(0, ranking, torch.arange(len(ranking)))

    def _places(self, given: Namespace, count: int, own: bool) -> Places:
        folder = self.folder
        chosen = [i for i in range(len(folder.shards)) if (i % HELD_OUT == 0) is own]
        known = (folder.network, folder.head, folder.shards, chosen)
        return collect_places(*known, given.depths, count, given.seed, own)

    def found(self, rows: int, scored: torch.Tensor) -> tuple[int, Found]:
        return rows, score(self.held, scored, self.rank[self.held.wanted] < rows)

    def frequency(self) -> Iterator[tuple[int, Found]]:
        """The most frequent tokens."""
        for rows in self.sizes:
            yield self.found(rows, self.rank[self.held.wanted] < rows)

    def routed(self, clusters: Clusters, scores, own: bool = True) -> Iterator[tuple[int, Found]]:
        """Clusters beside a list of frequent tokens, the same number at each place."""
        asked = None if own else roots(self.held)
        always = self.rank[self.held.wanted] < self.listed
        for rows in self.sizes:
            if (count := (rows - self.listed) // clusters.size) > 0:
                chosen = routed(self.held, clusters, scores, count, asked)
                yield self.found(rows, chosen | always)

    def run(self) -> Iterator[tuple[str, Iterator[tuple[int, Found]]]]:
        """Yield all ways by name."""
        yield "frequency", self.frequency()
        network, head = self.folder.network, self.folder.head
        rest = self.artefact.ranking[self.listed :].sort().values
        for by, size, residual in WAYS:
            wanted = label_features(network, head, self.train) if by == "wanted" else head.float()
            clusters = Clusters.cut(rest[halved(wanted[rest])], size, len(head))
            router = teach(network, self.train, clusters, Teaching(residual=residual))
            scores, name = of_router(network, router, self.held), f"{size} a cluster, {by}"
            yield f"{name}, root", self.routed(clusters, scores, own=False)
            yield name, self.routed(clusters, scores)
        rows = head[rest].float()
        for rank in (rank for rank in RANKS if rank <= rows.shape[1]):
            u, s, v = torch.svd_lowrank(rows, rank, niter=3)

            def scores(places: torch.Tensor, up=v, down=u * s) -> torch.Tensor:
                return self.held.feature[places].float() @ up @ down.T

            one = Clusters.cut(rest, 1, len(head))
            yield f"single tokens, rank {rank} of the head", self.routed(one, scores)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", default="1475,2949,6144,12288", help="rows of the head to choose")
    parser.add_argument("--train", type=int, default=100_000, help="places to learn from")
    parser.add_argument("--held", type=int, default=20_000, help="places to count")
    parser.add_argument("--depths", type=int, default=3, help="drafts ahead")
    parser.add_argument("--listed", type=int, default=1024, help="frequent tokens beside clusters")
    given = parser.parse_args()
    if given.drafter is None:
        raise InvalidInput("--drafter: name a folder that `quickbeam train` left")
    trial, rows, ways = Trial(given), [], []
    for name, found in trial.run():
        row: dict[str, object] = {"chosen by": name, **{f"{n:,}": "-" for n in trial.sizes}}
        for size, one in found:
            row[f"{size:,}"] = f"{one.recall:.4f}"
            ways.append({"name": name, "rows": size, **one._asdict()})
        rows.append(row)
    finish(given, rows, text=trial.folder.shards.tokens, ways=ways)


if __name__ == "__main__":
    script(main)
