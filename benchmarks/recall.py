"""How often the token that the target finds likeliest would be scored, by ways to choose rows.

    python benchmarks/recall.py --drafter FOLDER --rows 1475,2949,6144,12288

FOLDER is one that `quickbeam train` left, with its text and shortlist. Routers are trained on four
conversations of five; places of the fifth are counted. "Places" are clusters of tokens that follow
in the same places (PIFA), "rows" clusters of alike rows of the head (DynaSpec). The figure is the
recall with the context's tokens beside.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import torch

from common import arguments, finish, numbers, script
from quickbeam.drafters.shortlist.layout import Layout
from quickbeam.drafters.shortlist.shortlist import Artefact
from quickbeam.errors import InvalidInput
from quickbeam.train.places import collect_places
from quickbeam.train.router import CLUSTERINGS, halve, recall, routed, train_router
from quickbeam.train.shortlist import ShortlistTraining

HELD_OUT = 5  # one in this many conversations is counted
# clusters of what, tokens of a cluster, and whether the router learns only what the context lacks
WAYS = (("pifa", 16, True), ("pifa", 64, True), ("pifa", 8, True), ("kmeans", 16, True))
WAYS += (("kmeans", 512, False),)  # the paper's
NAMES = {"pifa": "places", "kmeans": "rows"}
Recalls = Iterator[tuple[int, float]]


def ways(
    given: Namespace, folder: ShortlistTraining, ranking: torch.Tensor
) -> Iterator[tuple[str, Recalls]]:
    """Yield all ways by name, with their figures by the number of rows."""
    sizes, listed = [int(one) for one in numbers(given.rows)], given.listed
    places, held = (
        collect_places(
            folder.network,
            folder.target,
            folder.shards,
            [i for i in range(len(folder.shards)) if (i % HELD_OUT == 0) is own],
            given.depths,
            count,
            given.seed,
        )
        for count, own in ((given.train, False), (given.held, True))
    )
    folder.to_cpu()
    network, head = folder.network, folder.target.head
    rank = torch.empty_like(ranking).index_copy_(0, ranking, torch.arange(len(ranking)))
    rank = rank[held.target]
    yield "frequency", ((rows, recall(held, rank < rows)) for rows in sizes)
    rest = ranking[listed:].sort().values
    for name, size, residual in WAYS:
        features = CLUSTERINGS[name](network, head, places)
        order = torch.cat([ranking[:listed], rest[halve(features[rest], size)]])
        layout = Layout(order, listed, size, len(head))
        router = train_router(network, places, layout.cluster_of, residual)
        figures = []
        for rows in sizes:
            if (count := (rows - listed) // size) > 0:
                hit = routed(network, router, held, layout.cluster_of, count) | (rank < listed)
                figures.append((rows, recall(held, hit)))
        yield f"{size} a cluster, {NAMES[name]}", iter(figures)


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
    out, rows, records = Path(given.drafter), [], []
    ranking, folder = Artefact.load(out).ranking, ShortlistTraining(given.model, out)
    for name, figures in ways(given, folder, ranking):
        row: dict[str, object] = {"chosen by": name}
        row |= {f"{int(one):,}": "-" for one in numbers(given.rows)}
        for size, one in figures:
            row[f"{size:,}"] = f"{one:.4f}"
            records.append({"name": name, "rows": size, "recall": one})
        rows.append(row)
    finish(given, rows, text=folder.shards.tokens, ways=records)


if __name__ == "__main__":
    script(main)
