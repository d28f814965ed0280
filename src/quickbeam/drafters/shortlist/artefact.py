"""The files that training a shortlist writes.

They hold the layout, a ranking of the tokens by frequency, and the router.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from quickbeam.drafters.folder import write_folder
from quickbeam.drafters.shortlist.layout import Layout, require_distinct
from quickbeam.drafters.shortlist.native import Router, RouterConfig
from quickbeam.errors import InvalidInput

TENSORS, FIELDS = "shortlist.safetensors", "shortlist.json"
PREFIX = "router."


@dataclass(frozen=True, eq=False)
class Artefact:
    """A trained shortlist, as it is stored in a folder.

    - `layout`: the frequent tokens and the clusters.
    - `ranking`: `[vocab]` int64, all tokens by falling frequency in the training text.
    - `router`: a router over the layout's clusters, or None.
    - `deepest`: the largest depth of a tree at which the router is asked. Nodes below score what
      the nodes above them do.

    Raises `InvalidInput` where the parts don't fit one another.
    """

    layout: Layout
    ranking: torch.Tensor
    router: Router | None = None
    deepest: int = 0

    def __post_init__(self) -> None:
        require_distinct(self.ranking, self.layout.vocab, "the ranking")
        if len(self.ranking) != self.layout.vocab:
            raise InvalidInput(
                f"the ranking holds {len(self.ranking)} tokens: must be all "
                f"{self.layout.vocab} of the layout's vocabulary"
            )
        if self.router is not None and self.router.config.clusters != self.layout.clusters:
            raise InvalidInput(
                f"the router scores {self.router.config.clusters} clusters, the "
                f"layout has {self.layout.clusters}"
            )

    def save(self, folder: Path) -> None:
        """Write `shortlist.safetensors` and `shortlist.json`, each complete or not at all.

        Token ids are stored as int32, the router in bfloat16.
        """
        tensors = {"order": self.layout.order.int(), "ranking": self.ranking.int()}
        if self.router is not None:
            tensors |= {PREFIX + name: one for name, one in self.router.state_dict().items()}
        record = {
            "frequent": self.layout.frequent,
            "size": self.layout.size,
            "vocab": self.layout.vocab,
            "deepest": self.deepest,
            "router": None if self.router is None else asdict(self.router.config),
        }
        write_folder(folder, record, tensors, torch.bfloat16, (FIELDS, TENSORS))

    @staticmethod
    def load(folder: Path) -> Artefact:
        """Load what `save` wrote. The router is in float32, on the CPU.

        Raises `InvalidInput` naming what is missing or does not fit.
        """
        router = None
        try:
            record = json.loads((folder / FIELDS).read_text(encoding="utf-8"))
            tensors = load_file(folder / TENSORS)
            sizes = (int(record[name]) for name in ("frequent", "size", "vocab"))
            layout = Layout(tensors["order"].long(), *sizes)
            if record["router"] is not None:
                with torch.device("meta"):  # makes no random weights that would be thrown away
                    router = Router(RouterConfig(**record["router"]))
                state = {k.removeprefix(PREFIX): v.float() for k, v in tensors.items()}
                state = {name: state[name] for name in router.state_dict()}
                router.load_state_dict(state, assign=True)
                router.eval()
            ranking, deepest = tensors["ranking"].long(), int(record.get("deepest", 0))
            return Artefact(layout, ranking, router, deepest)
        except (
            OSError,
            SafetensorError,
            LookupError,
            ValueError,
            TypeError,
            RuntimeError,
        ) as error:
            raise InvalidInput(
                f"{folder} holds no whole shortlist ({FIELDS}, {TENSORS}): {error!r}"
            ) from error

    @staticmethod
    def there(folder: Path) -> bool:
        """Whether `folder` holds the files of a shortlist.

        They may still be broken; `load` checks that.
        """
        return all((folder / name).is_file() for name in (FIELDS, TENSORS))
