"""From a model to a drafter with a shortlist by one command, which a second run finds done.

pytest tests/test_train_all.py
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from typer.testing import CliRunner

from quickbeam import LLM, SamplingParams
from quickbeam.cli.app import app


def test_one_command_leaves_a_drafter_with_a_shortlist_and_its_figures(
    toy_folder: str, tmp_path: Path
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text("\n".join(json.dumps({"prompt": f"say {i}"}) for i in range(60)))
    arguments = [
        "train",
        "--model",
        toy_folder,
        "--out",
        str(out),
        "--prompts",
        str(prompts),
        "--tokens",
        "1500",
        "--length",
        "64",
    ]
    arguments += [
        "--slots",
        "8",
        "--epochs",
        "1",
        "--rows",
        "500",
        "--limit",
        "2",
        "--max-tokens",
        "8",
    ]

    first = CliRunner().invoke(app, arguments)
    assert first.exit_code == 0, first.output
    assert [f"{i} of 3" in first.output for i in (1, 2, 3)] == [True] * 3
    for name in ("training", "router", "bench"):
        json.loads((out / f"{name}.json").read_text())
    methods = json.loads((out / "bench.json").read_text())["methods"]
    assert {"ar", "logitspec", "dyspec", "frspec", "dynaspec"} <= set(methods)
    assert all(row["identical"] == row["prompts"] for row in methods.values() if row["prompts"])
    made = (out / "router.json").stat().st_mtime_ns
    again = CliRunner().invoke(app, arguments)
    assert (
        again.exit_code == 0
        and "2 of 3" not in again.output
        and (out / "router.json").stat().st_mtime_ns == made
    )

    (tmp_path / "nothing").mkdir()
    refused = CliRunner().invoke(
        app, [*arguments, "--out", str(tmp_path / "more"), "--start", str(tmp_path / "nothing")]
    )
    assert refused.exit_code == 2 and "is not a drafter" in " ".join(refused.output.split())
    shutil.copytree(out, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"no tensors")
    refused = CliRunner().invoke(
        app, [*arguments, "--out", str(tmp_path / "more"), "--start", str(tmp_path / "broken")]
    )
    assert refused.exit_code == 2 and "is not a drafter" in " ".join(refused.output.split())
    further = [*arguments, "--out", str(tmp_path / "more"), "--start", str(out), "--quote", "0.3"]
    assert CliRunner().invoke(app, further).exit_code == 0
    assert "--quote 0.3 --start out" in (tmp_path / "more" / "README.md").read_text()

    llm = LLM(toy_folder, "dynaspec", dtype="float32", drafter=str(out), shortlist=256)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    answer = llm.generate("abc", params)
    assert answer.token_ids == llm.generate("abc", params, method="ar").token_ids
    assert answer.statistics.head is not None and answer.statistics.head.tokens > 0
