"""The tables of costs: of a pass, of weights, of growing a tree and of a drafter's head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quickbeam.bench.grid import TIMES, Grid, figure, grid

Content = Mapping[str, Any]


def passes(content: Content) -> list[Grid]:
    ways, rows = content["contexts"], []
    native = content.get("native", {}).get("parts", {})
    ours = "native" if "native" in ways else list(ways)[-1]
    for context, by_width in ways[ours].items():
        for width in by_width:
            parts = native.get(context, {}).get(width, {})
            rows.append(
                {
                    "behind": f"{int(context):,}",
                    "tokens a pass": width,
                    **{name: figure(found[context][width], ".1f") for name, found in ways.items()},
                    f"{ours} over the narrowest": figure(
                        content["over_first_width"][ours][context][width]
                    ),
                    f"{ours} over the shortest": figure(
                        content["over_first_context"][ours][context][width]
                    ),
                    **{
                        part: figure(parts.get(part), ".1f")
                        for part in ("products", "attention", "rest")
                    },
                    "GB/s": figure(parts.get("gigabytes_per_second"), ".1f"),
                    "of memory's": figure(parts.get("share"), ".0%"),
                }
            )
    found = [
        grid(
            "passes",
            "milliseconds of one pass, by the tokens behind it and those it looks at",
            rows,
            2,
        )
    ]
    if peer := content.get("llama_cpp"):
        name = peer["way"]
        beside = [
            {
                "behind": f"{int(context):,}",
                "llama.cpp": figure(one["milliseconds"], ".1f"),
                name: figure(one.get("ours"), ".1f"),
                f"{name} over llama.cpp": figure(one.get("ratio")),
            }
            for context, one in peer["contexts"].items()
        ]
        found.append(
            grid("llama.cpp", f"milliseconds of one token, llama.cpp beside {name}", beside)
        )
    return found


def weights(content: Content) -> list[Grid]:
    rows = []
    for name, one in content["weights"].items():
        over = content["over_first"][name]
        rows.append(
            {
                "weights": name,
                **{
                    f"ms, {_tokens(width)}": f"{ms:.1f} ({over['pass'][width]:.2f}{TIMES})"
                    for width, ms in one["pass_ms"].items()
                },
                "perplexity": f"{one['perplexity']:.3f} ({over['perplexity'] - 1:+.2%})",
                "tokens that stay": figure(one["stays"], ".1%"),
                **{
                    f"tokens/s, {method}": f"{rate:.1f} "
                    f"({over['tokens_per_second'][method]:.2f}{TIMES})"
                    for method, rate in one["tokens_per_second"].items()
                },
                "identical": f"{one['identical']}/{one['prompts']}",
                "MB a pass": figure(one["bytes"] / 1e6, ".0f"),
            }
        )
    return [
        grid(
            "weights",
            "in brackets: how much faster than the first, and how much higher its perplexity is",
            rows,
        )
    ]


def _tokens(width: str) -> str:
    return "1 token" if width == "1" else f"{width} tokens"


def drafting(content: Content) -> list[Grid]:
    rows: dict[tuple[str, float], dict[str, str]] = {}
    for one in content["drafting"]:
        row = rows.setdefault(
            (one["policy"], one["temperature"]),
            {"tree": one["policy"], "temperature": f"{one['temperature']:g}"},
        )
        row[f"{one['budget']} nodes"] = f"{one['milliseconds']:.2f} ({one['calls']:.1f})"
    title = (
        "milliseconds a step apart from the drafter's calls, vocabulary of "
        f"{content['vocab']:,}; in brackets: calls a step"
    )
    return [grid("drafting", title, list(rows.values()), 2)]


def heads(content: Content) -> list[Grid]:
    rows = [
        {
            "head": f"{one['name']} {one['vocab']:,} {TIMES} {one['d']:,}",
            "rows": str(one["rows"]),
            "scored": figure(one["tokens"], ","),
            "share": figure(one["tokens"] / one["vocab"], ".1%"),
            "full": figure(one["full_ms"]),
            "a drafter's full": figure(one.get("drafter_ms")),
            "shortlist": figure(one["head_ms"]),
            "router": figure(one["router_ms"]),
            "ratio": figure(one["ratio"]),
        }
        for one in content["heads"]
    ]
    return [
        grid(
            "heads",
            f"milliseconds of a head on cold caches, {content['dtype']}; ratio: "
            "shortlist and router over the full head",
            rows,
            2,
        )
    ]
