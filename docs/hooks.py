"""What mkdocs asks while it builds the site: the command line's reference, and pages of the source
files that other pages link to.

Pages link to code as `[text](../src/quickbeam/FILE.py#NAME)`, which works in a checkout too. In the
site such a link leads to a page with the whole file, at the line of NAME (`Class`, `function` or
`Class.method`).
"""

from __future__ import annotations

import ast
import inspect
import os
import re
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MARK = "<!-- commands -->"  # in reference/cli.md: where the commands go
TABLE = "<!-- families -->"  # in models.md: where the families go
PARTS = "<!-- composites -->"  # in models.md: where models of which a part runs go
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)(?:#([\w.-]+))?\)")
FENCES = {
    ".py": "python",
    ".cpp": "cpp",
    ".h": "cpp",
    ".md": "markdown",
    ".toml": "toml",
    ".json": "json",
}


# --- the command line -----------------------------------------------------------------------------


def commands() -> str:
    """Markdown of every command, from the application itself."""
    import typer.main

    from quickbeam.cli.app import app

    return "\n".join(described(typer.main.get_command(app), "quickbeam"))


def described(command: Any, name: str) -> list[str]:
    """A command's help, arguments and options, then those of its own commands."""
    context = command.context_class(command, info_name=name)
    usage = " ".join(command.collect_usage_pieces(context))
    parts = [
        f"## {name}",
        "",
        *paragraphs(command.help or ""),
        "```text",
        f"{name} {usage}",
        "```",
        "",
    ]
    rows = [row for parameter in command.params if (row := parameter_row(parameter, context))]
    if rows:
        parts += ["| | | default |", "| --- | --- | --- |", *rows, ""]
    for each in sorted(getattr(command, "commands", {})):
        parts += described(command.commands[each], f"{name} {each}")
    return parts


def parameter_row(parameter: Any, context: Any) -> str | None:
    """One row of a table: how it is given, what it means, what it is by default."""
    record = parameter.get_help_record(context)
    if getattr(parameter, "hidden", False) or parameter.name == "help":
        return None
    if record is None:  # an argument without help
        record = parameter.make_metavar(context), ""
    given, text = record
    text = re.sub(r"\s*\[(?:default: [^\]]*|required|x>=[^\]]*|[\d.e-]+<=x[^\]]*)\]\s*$", "", text)
    return f"| `{cell(given)}` | {cell(text, code=False)} | {default_of(parameter)} |"


def default_of(parameter: Any) -> str:
    """What holds where a parameter is not given."""
    value = parameter.default
    if parameter.required:
        return "required"
    if value is True:
        return f"`{parameter.opts[0]}`"
    if (
        value is None
        or value is False
        or callable(value)
        or value in ((), [])
        or "UNSET" in str(value)
    ):
        return ""
    return f"`{cell(str(getattr(value, 'value', value)))}`"


def cell(text: str, code: bool = True) -> str:
    """Text that can stand in a cell of a table."""
    text = " ".join(text.split()).replace("|", "\\|")
    return text if code else re.sub(r"([<>*_\[\]])", r"\\\1", text)


def paragraphs(text: str) -> list[str]:
    return [line for part in text.split("\n\n") for line in (" ".join(part.split()), "")]


# --- the families ---------------------------------------------------------------------------------


# what default configurations lack
LACKING = {
    name: {"layer_types": ["conv", "full_attention"] * 3, "num_hidden_layers": 6}
    for name in ("lfm2", "lfm2_moe")
}
LACKING["nemotron_h"] = {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]}
LACKING["qwen3_vl_moe_text"] = {"num_experts": 128, "num_experts_per_tok": 8}
LACKING["hunyuan_v1_moe"] = {"num_experts": 64, "moe_topk": 8}
LACKING["granitemoeshared"] = {"shared_intermediate_size": 1024}
LACKING["granitemoe_swa"] = {"shared_intermediate_size": 1024}
LACKING["dots1"] = {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2}
LACKING["deepseek_v2"] = {"num_experts_per_tok": 6}


@cache
def families() -> str:
    """A table of the families, from the architecture of each one's default configuration."""
    import torch
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from quickbeam.models.families import FAMILIES
    from quickbeam.models.families.reading import Config

    rows = ["| architecture | `model_type` | mixes tokens by | feed-forward | norms |"]
    rows.append("| --- | --- | --- | --- | --- |")
    for kind, family in sorted(FAMILIES.items()):
        stack = family(Config(CONFIG_MAPPING[kind](**LACKING.get(kind, {})), torch.bfloat16))
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, CONFIG_MAPPING[kind].__name__)
        name = name.removesuffix("ForCausalLM").removesuffix("TextConfig")
        file = Path(inspect.getfile(family)).relative_to(ROOT)
        linked = f"[{name.removesuffix('LMHeadModel')}](../{file}#{family.__name__})"
        columns = zip(*map(words_of, stack.layers), strict=True)
        cells = (", ".join(dict.fromkeys(column)) for column in columns)
        rows.append(f"| {linked} | `{kind}` | {' | '.join(cells)} |")
    return "\n".join(rows)


def words_of(layer: Any) -> tuple[str, str, str]:
    """What a layer mixes tokens by, its feed-forward, and its norms."""
    one, fed, mixers = layer.attention, layer.feed_forward, list[str]()
    if layer.recurrent is not None:
        kinds = {None: "short convolution", True: "gated delta rule", False: "Mamba-2"}
        mixers.append(kinds[getattr(layer.recurrent, "delta", None)])
    if one is not None:
        said = {
            "window": getattr(one, "window", None),
            "latent": getattr(one, "latent", None),
            "no angles": one.rotary is None,
            "QK norm": getattr(one, "norms", None),
            "softcap": getattr(one, "softcap", None),
            "sinks": getattr(one, "sinks", None),
            "output gate": getattr(one, "gated", False),
            "another layer's keys and values": getattr(one, "source", None) is not None,
        }
        how = [word for word, there in said.items() if there]
        mixers.append("attention" + (f" ({', '.join(how)})" if how else ""))
    experts = getattr(fed, "routing", None)
    if experts is not None:
        shared = " and a shared one" if fed.shared is not None else ""
        count, activation = len(fed.candidates), fed.candidates[0].activation
        feeds = f"{experts.top} of {count} experts{shared}, {activation}"
    else:
        feeds = "none" if fed is None else f"{'gated ' if fed.gated else ''}{fed.activation}"
    norm = layer.attention_before or layer.attention_after or layer.feed_forward_before
    before = layer.attention_before or layer.feed_forward_before
    places = ["before"] * (before is not None)
    places += ["after"] * (layer.attention_after is not None)
    kind = "layer norm" if norm is not None and norm.centred else "RMS"
    norms = f"{kind} {' and '.join(places)}{', parallel' if layer.parallel else ''}"
    return " + ".join(mixers) or "nothing", feeds, norms


# --- the source -----------------------------------------------------------------------------------


def line_of(path: Path, name: str) -> int:
    """Where a Python file defines `name`. Raises `ValueError` where it does not."""
    scope: Any = ast.parse(path.read_text(encoding="utf-8"))
    for part in name.split("."):
        for node in scope.body:
            names = [
                target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)
            ]
            names += (
                [node.target.id]
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
                else []
            )
            if part == getattr(node, "name", None) or part in names:
                scope = node
                break
        else:
            raise ValueError(f"{path} defines no {name}")
    return int(scope.lineno)


def page_of(file: str) -> str:
    """Where the site keeps a file of the repository."""
    return f"source/{file}.md"


def outside(target: str, page: str) -> str | None:
    """The file of the repository that a page's link leads to; None where it stays within docs/."""
    path = os.path.normpath(PurePosixPath("docs", page).parent / target)
    return None if path.startswith("docs/") else path


def rewritten(text: str, page: str) -> str:
    """A page whose links to the repository lead into the site."""

    def link(found: re.Match[str]) -> str:
        target, name = found.groups()
        file = outside(target, page)
        if file is None:
            return found[0]
        anchor = (
            f"#__codelineno-0-{line_of(ROOT / file, name)}" if name and file.endswith(".py") else ""
        )
        return f"]({os.path.relpath(page_of(file), PurePosixPath(page).parent)}{anchor})"

    return LINK.sub(link, text)


def on_files(files: Any, config: Any) -> Any:
    """Adds a page for each file of the repository that some page links to."""
    from mkdocs.structure.files import File, InclusionLevel

    wanted: set[str] = set()
    for file in files.documentation_pages():
        text = file.content_string
        text = text.replace(TABLE, families()) if TABLE in text else text
        found = (outside(target, file.src_uri) for target, _ in LINK.findall(text))
        wanted |= {name for name in found if name is not None}
    for name in sorted(wanted):
        body = (ROOT / name).read_text(encoding="utf-8")
        fence = "`" * 5
        head = "---\nsearch:\n  exclude: true\n---\n"
        text = (
            f"{head}# {name}\n\n{fence}{FENCES.get(Path(name).suffix, 'text')} "
            f'linenums="1"\n{body}{fence}\n'
        )
        files.append(
            File.generated(config, page_of(name), content=text, inclusion=InclusionLevel.NOT_IN_NAV)
        )
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fills in the commands, and turns links to the repository into links to its pages here."""
    if page.file.src_uri.startswith("source/"):
        return markdown
    if TABLE in markdown:
        markdown = markdown.replace(TABLE, families())
    if PARTS in markdown:
        from quickbeam.models.weights.sources import COMPOSITES

        markdown = markdown.replace(PARTS, ", ".join(f"`{one}`" for one in sorted(COMPOSITES)))
    text = rewritten(markdown, page.file.src_uri)
    return text.replace(MARK, commands()) if MARK in text else text


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Tells mkdocs of the anchors of lines, which it does not look for."""
    if page.file.src_uri.startswith("source/") and page.present_anchor_ids is not None:
        page.present_anchor_ids |= set(re.findall(r'id="(__codelineno-[\d-]+)"', html))
    return html
