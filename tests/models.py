"""Tiny random models of many layouts, and the plain way to run them."""

import copy
import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, JetMoeConfig

from quickbeam.tree import TokenTree

VOCAB = 97
SIZES = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096)
SIZES |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)


def table(name, made=AutoConfig.for_model):
    """What a table of `tiny_models.jsonl` has by name; `SIZES` where a line says no other."""
    configs = {}
    for line in Path(__file__).with_name("tiny_models.jsonl").read_text().splitlines():
        fields = json.loads(line)
        if fields.pop("table") == name:
            own, left_out = fields.pop("name"), fields.pop("without", ())
            sizes = {field: size for field, size in SIZES.items() if field not in left_out}
            configs[own] = made(**(sizes if fields.pop("sizes", True) else {}) | fields)
    return configs


CONFIGS = table("layouts")
UNDESCRIBED = JetMoeConfig(**SIZES)  # a family that is not described


def tiny(name, dtype=torch.float32, seed=0, wide=False, layers=None, config=None):
    """A random model with logits far enough apart to tell tokens by. `wide`: heads of 32
    dimensions, as small as real ones get. `layers`: so many, not 3. `config`: of this one, not
    `name`'s."""
    torch.manual_seed(seed)
    config = copy.deepcopy(CONFIGS[name] if config is None else config)
    if layers is not None:
        config.num_hidden_layers = layers
        if kinds := getattr(config, "layer_types", None):
            config.layer_types = [kinds[i % len(kinds)] for i in range(layers)]
    if wide:
        config.hidden_size = 128
        if "head_dim" in config.to_dict():
            config.head_dim = 32
    how = dict(dtype=dtype, attn_implementation="eager")
    return spread_out(AutoModelForCausalLM.from_config(config, **how))


@torch.no_grad()
def spread_out(model, by=6, vectors=0.0):
    """The model with larger weights. `vectors`: so much noise in norms and biases."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(by)
        elif vectors:
            parameter.add_(torch.randn_like(parameter) * vectors)
    return model.eval()


@torch.inference_mode()
def path_logits(model, prefix, tree, nodes=None):
    """`[n, vocab]`: each path from the root to a node run on its own, prefix and all."""
    rows = []
    for node in range(len(tree)) if nodes is None else nodes:
        ids = prefix + [tree.token[i] for i in tree.path(node)]
        rows.append(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1])
    return torch.stack(rows)


def random_tree(generator, nodes, vocab=VOCAB):
    def below(high):
        return int(torch.randint(high, (1,), generator=generator))

    tree = TokenTree(below(vocab))
    for _ in range(nodes - 1):
        parent, token = below(len(tree)), below(vocab)
        if tree.child(parent, token) is None:
            tree.add(parent, token, "random")
    return tree
