"""The tables on drafters: their vocabularies, recall, draft trees and acceptance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quickbeam.bench.grid import NONE, TIMES, Grid, figure, grid

Content = Mapping[str, Any]


def vocabulary(content: Content) -> list[Grid]:
    rows = [
        {
            "vocabulary": one["vocab"],
            "asked": figure(one["asked"], ","),
            "scored": figure(one["scored"], ",.0f"),
            "share": figure(one["share"], ".1%"),
            "MAT": figure(one["mat"]),
            "MAT kept": _kept(one),
            "less the first": NONE
            if one.get("gap") is None
            else _signed(one["gap"], one["gap_error"]),
            "recall": figure(one["recall"], ".3f"),
            "rare recall": figure(one.get("rare_recall"), ".3f"),
            "head ms": figure(one["head_ms"]),
            "of full": figure(one["head_ratio"]),
            "speed-up": figure(one["speedup"], ".2f", TIMES),
        }
        for one in points_of(content["points"] if "points" in content else content["overall"])
    ]
    parts = [
        {"category": category} | {_sized(one): _kept(one) for one in points_of(found)}
        for category, found in content["by_category"].items()
    ]
    size = f"vocabulary of {content['vocab_size']:,} tokens"
    return [
        grid("overall", f"{size}; head ms of a call; speed-up over the full vocabulary", rows),
        grid("categories", f"{size}; MAT kept, by category", parts),
    ]


def recall(content: Content) -> list[Grid]:
    rows = [
        {
            "chosen by": one["name"],
            "rows": figure(one["rows"], ","),
            "recall": figure(one["recall"], ".4f"),
            "alone": figure(one["alone"], ".4f"),
            "of rare": figure(one["rare_recall"], ".3f"),
            "of the drafter's right": figure(one["right"], ".4f"),
        }
        for one in content["ways"]
    ]
    sizes = list(dict.fromkeys(one["rows"] for one in content["ways"]))
    ways = {
        name: {one["rows"]: one for one in content["ways"] if one["name"] == name}
        for name in dict.fromkeys(one["name"] for one in content["ways"])
    }
    by_size = [
        {"chosen by": name}
        | {
            f"{key} {rows:,}": figure(found[rows][key], ".4f") if rows in found else NONE
            for key in ("recall", "alone", "right")
            for rows in sizes
        }
        for name, found in ways.items()
    ]
    told = [
        {
            "router": one["name"],
            "rows": figure(one["rows"], ","),
            "it is": figure(one["drafted"], ".4f"),
            "by its probability": figure(one["probability"], ".4f"),
            "and the router's mass": figure(one["mass"], ".4f"),
            "gain": "{:+.4f} ± {:.4f}".format(*one["gain"]),
            "if it were known what is scored": "{:+.4f} ± {:.4f}".format(*one["bound"]),
        }
        for one in content.get("foretold", ())
    ]
    found = [
        grid(
            "ways",
            f"wanted tokens that would be scored, on {content['text']:,} tokens of "
            "the model's own text",
            rows,
        ),
        grid(
            "sizes",
            "wanted tokens that would be scored, by the rows of the head: with the context "
            "(recall), without it (alone), and of what the drafter has right (right)",
            by_size,
        ),
    ]
    if told:
        title = "is the drafter's likeliest scored token the wanted one? log loss, in nats a place"
        found.append(grid("mass", title, told))
    return found


def points_of(found: Sequence[Content]) -> list[Content]:
    """Return the vocabularies of a record.

    Fields that earlier records name otherwise get today's names.
    """
    return [
        one if "kept" in one else {**one, "kept": one["mat_kept"], "scored": one["tokens"]}
        for one in found
    ]


def _kept(one: Content) -> str:
    error = one.get("kept_error")
    return figure(one["kept"], ".1%") + (
        "" if error is None or one["vocab"] == "full" else f" ± {100 * error:.1f}"
    )


def _signed(value: float, error: float | None) -> str:
    return f"{100 * value:+.1f} %" + ("" if error is None else f" ± {100 * error:.1f}")


def _sized(one: Content) -> str:
    return str(one["vocab"]) if one["asked"] is None else f"{one['vocab']}@{one['asked']}"


def trees(content: Content) -> list[Grid]:
    rows: dict[tuple[float, str], dict[str, str]] = {}
    for heat in content["temperatures"]:
        first = heat["trees"][0]["tree"]
        for one in heat["trees"]:
            row = rows.setdefault(
                (heat["temperature"], one["tree"]),
                {"temperature": f"{heat['temperature']:g}", "tree": one["tree"]},
            )
            gap, error = one["difference"]["mean"], one["difference"]["error"]
            beside = (
                ""
                if one["tree"] == first
                else f" ({gap:+.3f})"
                if error is None
                else f" ({gap:+.3f} ± {error:.3f})"
            )
            row[f"{one['budget']} nodes"] = f"{one['tokens']:.3f}{beside}"
    places = ", ".join(
        f"{heat['places']} places at temperature {heat['temperature']:g}"
        for heat in content["temperatures"]
    )
    title = (
        "tokens a step; in brackets less those of the first tree, with the standard error by "
        f"answers; {places}"
    )
    return [grid("trees", title, list(rows.values()), 2)]


def acceptance(content: Content) -> list[Grid]:
    heats = [
        {
            "temperature": f"{one['temperature']:g}",
            "tried": str(one["tried"]),
            "accepted": str(one["accepted"]),
            "MAT": figure(one["mean_accepted_tokens"]),
            "first children accepted": figure(one["first_acceptance"], ".3f"),
            "calibration gap": figure(one["calibration_gap"], ".3f"),
            "correlation": figure(one["correlation"], ".3f"),
        }
        for one in content["temperatures"]
    ]
    bins = [
        {
            "temperature": f"{heat['temperature']:g}",
            "draft probability": f"{one['low']:.2f} to {one['high']:.2f}",
            "tried": str(one["count"]),
            "mean": figure(one["probability"], ".3f"),
            "accepted": figure(one["acceptance"], ".3f"),
            "95 % interval": NONE
            if one["interval"] is None
            else f"{one['interval'][0]:.3f} to {one['interval'][1]:.3f}",
        }
        for heat in content["temperatures"]
        for one in heat["bins"]
    ]
    depths = [
        {
            "depth": str(one["depth"]),
            "tried": str(one["count"]),
            "accepted": figure(one["acceptance"], ".3f"),
        }
        for one in content["by_depth"]
    ]
    agreement = content["agreement"]
    shares = [
        {
            "category": category,
            "tokens": str(count),
            "the drafter's likeliest": figure(agreement["agreed"][category] / count, ".3f"),
        }
        for category, count in agreement["tokens"].items()
        if count
    ]
    if shares:
        shares.append(
            {
                "category": "all",
                "tokens": str(sum(agreement["tokens"].values())),
                "the drafter's likeliest": figure(agreement["share"], ".3f"),
            }
        )
    return [
        grid("temperatures", "drafted tokens that verification reached", heats),
        grid("bins", "acceptance by draft probability", bins, 2),
        grid("depths", "first children, by depth", depths),
        *(
            [
                grid(
                    "agreement",
                    "how often the drafter's likeliest token is the model's, at every "
                    "token of plain greedy answers",
                    shares,
                )
            ]
            if shares
            else []
        ),
    ]
