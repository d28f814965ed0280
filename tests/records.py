"""Records of each bench command with figures that are easy to check, as the commands write them."""

from __future__ import annotations

from typing import Any

WHERE = {
    "python": "3.12.1",
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "cpu": "Test CPU <9000>",
    "cores": 2,
    "threads": 2,
    "device": "cpu",
    "dtype": "bfloat16",
    "kernels": "native (avx2)",
    "commit": "0123456789abcdef",
}


def method(mat: float, rate: float, speedup: float, prompts: int, **more: Any) -> dict[str, Any]:
    return {
        "prompts": prompts,
        "tokens": 100 * prompts,
        "seconds": 100 * prompts / rate,
        "tokens_per_second": rate,
        "speedup": speedup,
        "mean_accepted_tokens": mat,
        "identical": prompts,
        "draft_ms": 3.0,
        "verify_ms": 12.0,
        "overhead_ms": 1.0,
        "drafter_calls": 2.0,
        "drafter_ms": 2.0,
        "head_ms": None,
        "shortlist": None,
        "recall": None,
        "break_even_ms": 4.0,
        "prefill_ms": 40.0,
        "nodes": 8.0,
        "accepted": {"drafter": 1.25, "ngram": 0.25},
        **more,
    }


def methods() -> dict[str, Any]:
    """`auto` needs 2 and 3 seconds where `ar` needs 8 and 6; their categories have two prompts
    each."""
    plain = {
        "draft_ms": 0.0,
        "drafter_ms": 0.0,
        "drafter_calls": 0.0,
        "accepted": {},
        "nodes": 1.0,
        "break_even_ms": None,
    }
    untold = {
        "draft_ms": None,
        "verify_ms": None,
        "overhead_ms": None,
        "drafter_ms": None,
        "drafter_calls": None,
        "accepted": None,
    }
    rows = {
        "ar": method(1.0, 50.0, 1.0, 4, **plain),
        "auto": method(2.5, 140.0, 2.8, 4),
        "hf": method(1.0, 20.0, 0.4, 4, identical=None, nodes=None, break_even_ms=None, **untold),
    }
    for row in rows.values():
        row["by_category"] = {
            "maths": {**row, "prompts": 2},
            "a|b <i>": {**row, "prompts": 2, "speedup": row["speedup"] + 0.5},
        }
    seconds = {
        "ar": (8.0, 8.0, 6.0, 6.0),
        "auto": (2.0, 4.0, 3.0, 3.0),
        "hf": (20.0, 20.0, 20.0, 20.0),
    }
    return {
        "environment": WHERE,
        "model": "<b>model</b>",
        "settings": {"limit": 4, "temperature": 0.0},
        "questions": 4,
        "complete": True,
        "reference": "ar",
        "methods": rows,
        "differences": [],
        "skipped": [],
        "trials": [
            {
                "question_id": i,
                "category": ("maths", "a|b <i>")[i // 2],
                "turn": 0,
                "answers": {
                    name: {"decoded": 400, "seconds": taken[i]} for name, taken in seconds.items()
                },
            }
            for i in range(4)
        ],
    }


def vocabulary() -> dict[str, Any]:
    def kept(vocab: str, asked: int | None, share: float, kept: float) -> dict[str, Any]:
        figures = {
            "mat": 3 * kept,
            "mat_kept": kept,
            "recall": None if vocab == "full" else 0.9,
            "head_ms": 4 * share,
            "head_ratio": share,
        }
        return {
            "vocab": vocab,
            "asked": asked,
            "tokens": 1000 * share,
            "share": share,
            "speedup": 1.25,
            **figures,
        }

    rows = [
        kept("full", None, 1.0, 1.0),
        kept("router", 60, 0.0625, 0.96),
        kept("router", 250, 0.25, 0.99),
    ]
    record = methods() | {
        "reference": "full",
        "vocab_size": 1000,
        "overall": rows,
        "by_category": {"maths": rows},
    }
    return record


def trees() -> dict[str, Any]:
    def heat(temperature: float) -> dict[str, Any]:
        rows = [
            {
                "tree": name,
                "budget": size,
                "tokens": tokens,
                "difference": {"mean": tokens - first, "error": None if name == "greedy" else 0.02},
            }
            for name, found in (("greedy", (2.5, 3.25)), ("eagle2", (2.25, 3.0)))
            for size, tokens, first in zip((8, 16), found, (2.5, 3.25), strict=True)
        ]
        return {"temperature": temperature, "places": 96, "trees": rows}

    record = {
        "environment": WHERE,
        "model": "m",
        "settings": {"draws": 4},
        "complete": True,
        "prompts": 8,
    }
    return {**record, "temperatures": [heat(0.0), heat(0.6)]}


def acceptance() -> dict[str, Any]:
    bins = [
        {
            "low": 0.0,
            "high": 0.5,
            "count": 0,
            "accepted": 0,
            "probability": None,
            "acceptance": None,
            "interval": None,
        },
        {
            "low": 0.5,
            "high": 1.0,
            "count": 40,
            "accepted": 30,
            "probability": 0.8,
            "acceptance": 0.75,
            "interval": [0.6, 0.86],
        },
    ]
    depths = [{"depth": 1, "count": 40, "accepted": 30, "acceptance": 0.75}]
    heat = {
        "temperature": 0.6,
        "steps": 20,
        "tokens": 50,
        "tried": 40,
        "accepted": 30,
        "mean_accepted_tokens": 2.5,
        "calibration_gap": 0.05,
        "correlation": 0.321,
        "first_acceptance": 0.7,
        "bins": bins,
        "by_depth": depths,
    }
    return {
        "environment": WHERE,
        "model": "m",
        "settings": {"bins": 2},
        "prompts": 4,
        "complete": False,
        "temperatures": [heat],
        "by_depth": depths,
        "agreement": {"share": 0.625, "tokens": {"maths": 80}, "agreed": {"maths": 50}},
        "skipped": [],
    }


def throughput() -> dict[str, Any]:
    def cell(rate: float, decoding: float) -> dict[str, Any]:
        times = {
            "p50_ttft_ms": 120.4,
            "p95_ttft_ms": 300.0,
            "p50_tpot_ms": 11.0,
            "p95_tpot_ms": 13.0,
        }
        counts = {
            "mean_accepted_tokens": 2.0,
            "nodes_per_step": 4.5,
            "identical": 8,
            "prompts": 8,
            "cancelled": 0,
            "seconds": 9.0,
        }
        return {
            "tokens_per_second": rate,
            "decoding_tokens_per_second": decoding,
            **times,
            **counts,
        }

    loads = {
        "1": {"ar": cell(80.0, 100.0), "auto": cell(120.0, 160.0)},
        "16": {"ar": cell(240.0, 500.0), "auto": cell(252.0, 0.0)},
    }
    return {
        "environment": WHERE,
        "model": "m",
        "settings": {"rounds": 1},
        "concurrency": loads,
        "over_ar": {},
    }


def weights() -> dict[str, Any]:
    def row(pass_ms: float, perplexity: float, rate: float, size: int) -> dict[str, Any]:
        rates = {"ar": rate, "auto": 2 * rate}
        counts = {"identical": 8, "prompts": 8, "bytes": size}
        return {
            "pass_ms": {"1": pass_ms, "8": 2 * pass_ms},
            "perplexity": perplexity,
            "stays": 0.95,
            "tokens_per_second": rates,
            **counts,
        }

    over = {
        name: {
            "perplexity": perplexity,
            "pass": {"1": faster, "8": faster},
            "tokens_per_second": {"ar": faster, "auto": faster},
        }
        for name, perplexity, faster in (("bfloat16", 1.0, 1.0), ("int8", 1.02, 1.6))
    }
    rows = {
        "bfloat16": row(16.0, 20.0, 60.0, 269_000_000),
        "int8": row(10.0, 20.4, 96.0, 140_000_000),
    }
    return {
        "environment": WHERE,
        "model": "m",
        "settings": {"context": 200},
        "kernels": {},
        "weights": rows,
        "over_first": over,
    }


def passes() -> dict[str, Any]:
    times = {
        "transformers": {"100": {"1": 50.0, "8": 60.0}},
        "native": {"100": {"1": 10.0, "8": 12.5}},
    }
    part = {
        "milliseconds": 10.0,
        "products": 8.0,
        "attention": 0.5,
        "rest": 1.5,
        "gigabytes_per_second": 26.9,
        "share": 0.93,
    }
    over = {"transformers": {"100": {"1": 1.0, "8": 1.2}}, "native": {"100": {"1": 1.0, "8": 1.25}}}
    return {
        "model": "m",
        "context": 100,
        "dtype": "bfloat16",
        "weights": "bfloat16",
        "milliseconds": {name: found["100"] for name, found in times.items()},
        "contexts": times,
        "over_first_width": over,
        "over_first_context": {name: {"100": {"1": 1.0, "8": 1.0}} for name in times},
        "native": {
            "weight_bytes": 269_000_000,
            "gigabytes_per_second": {"sum": 29.0, "product": 28.0},
            "parts": {"100": {"1": part}},
        },
        "llama_cpp": {
            "way": "native",
            "contexts": {"100": {"milliseconds": 12.5, "ours": 10.0, "ratio": 0.8}},
        },
        "environment": WHERE,
    }


def structured() -> dict[str, Any]:
    row = {
        "answers": 10,
        "valid": 9,
        "identical": 10,
        "tokens": 460,
        "steps": 230,
        "seconds": 5.0,
        "tokens_per_second": 92.0,
    }
    found = {
        kind: {"ar": row | {"mean_accepted_tokens": 2.0}} for kind in ("free text", "JSON schema")
    }
    return {"environment": WHERE, "model": "m", "settings": {"answers": 1}, "structured": found}


def drafting() -> dict[str, Any]:
    rows = [
        {
            "policy": "greedy",
            "temperature": 0.6,
            "budget": size,
            "milliseconds": size / 16,
            "calls": 3.5,
            "nodes": float(size),
        }
        for size in (8, 16)
    ]
    return {
        "environment": WHERE,
        "vocab": 49152,
        "coupling": "coupled",
        "threads": 1,
        "repeats": 25,
        "cold": False,
        "drafting": rows,
    }


def heads() -> dict[str, Any]:
    row = {
        "name": "Llama-3-8B",
        "vocab": 128256,
        "d": 4096,
        "rows": 4,
        "share": 0.125,
        "tokens": 16032,
    }
    times = {"full_ms": 40.0, "head_ms": 5.0, "router_ms": 0.25, "ratio": 0.13125}
    return {"environment": WHERE, "dtype": "bfloat16", "device": "cpu", "heads": [row | times]}


def recall() -> dict[str, Any]:
    way = {
        "name": "list",
        "rows": 2949,
        "recall": 0.9731,
        "alone": 0.8761,
        "rare_recall": 0.125,
        "right": 0.9961,
    }
    told = {"name": "router", "rows": 2949, "drafted": 0.51, "probability": 0.5, "mass": 0.49}
    told |= {"known": 0.4, "gain": (0.01, 0.002), "bound": (0.1, 0.003)}
    settings = {"rows": 1000, "seed": 0}
    return {"settings": settings, "text": 80191, "ways": [way], "foretold": [told]}


RECORDS = {
    make.__name__: make
    for make in (
        vocabulary,
        methods,
        acceptance,
        trees,
        throughput,
        weights,
        passes,
        structured,
        drafting,
        heads,
        recall,
    )
}
