"""Writes the tables of sizes in docs/dryrun.md, from the functions that dryrun and plan count with.

python docs/sizes.py    # prints the part of the page between the two comments that name it

A test compares the committed part with this text.
"""

from __future__ import annotations

from dataclasses import replace

from omegaconf import OmegaConf

from parallel3d.blueprint.parameters import parameter_count, stage_parameters
from parallel3d.models.declared import LayerKind, layer
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import conf_dir

TP = 8


def gpt3() -> ModelConfig:
    """Returns GPT-3 of 175 billion parameters, with its vocabulary unpadded."""
    file = conf_dir() / "model" / "gpt3_175b.yaml"
    return replace(ModelConfig(**OmegaConf.to_container(OmegaConf.load(file))), vocab_multiple=1)


def rows_of_sizing(model: ModelConfig) -> list[tuple[str, str, int]]:
    """Returns (part, formula, parameters) for each part."""
    layer = {p.name: p.numel for p in stage_parameters(model, 1, range(1), False, False)}

    def matrices(part: str) -> int:
        names = [n for n in layer if f".{part}." in n and n.endswith(".weight") and "norm" not in n]
        return sum(layer[name] for name in names)

    h, layers = f"{model.hidden_size:,}", model.num_layers
    attention, mlp = matrices("attention"), matrices("mlp")
    ends = {p.name: p.numel for p in stage_parameters(model, 1, range(0), True, False)}
    rest = parameter_count(model) - layers * (attention + mlp) - sum(ends.values())
    return [
        ("attention of a layer: q, k, v and output", f"4 · {h}²", attention),
        ("MLP of a layer: up and down", f"8 · {h}²", mlp),
        (f"{layers} layers", f"{layers} · 12 · {h}²", layers * (attention + mlp)),
        ("embedding of tokens, also the head", f"{model.vocab_size:,} · {h}",
         ends["embedding.word.weight"]),
        ("positions", f"{model.max_positions:,} · {h}", ends["embedding.position"]),
        ("biases and norms", "", rest),
        ("all", "", parameter_count(model)),
    ]  # fmt: skip


def sizing(model: ModelConfig) -> str:
    lines = ["| part | | parameters | in 16 bits |", "|---|---|---|---|"]
    for part, formula, count in rows_of_sizing(model):
        billions = f"{count / 1e9:.3f} B" if count >= 1e8 else f"{count / 1e6:.1f} M"
        size = f"{2 * count / 1e9:.2f} GB" if count >= 1e8 else f"{2 * count / 1e6:.0f} MB"
        lines.append(f"| {part} | {formula} | {billions} | {size} |")
    return "\n".join(lines)


def shapes(model: ModelConfig) -> str:
    """Tabulates the tensors that a layer's operations read, multiply by and make, on one rank and
    on each of TP."""
    lines = [
        f"| operation | input | weight | output | input, tp={TP} | weight, tp={TP} "
        f"| output, tp={TP} |",
        "|---|---|---|---|---|---|---|",
    ]
    one, split = (operations(model, tp) for tp in (1, TP))
    for name, whole in one.items():
        cells = [f"`{name}`"]
        for k, weight, n in (whole, split[name]):
            cells += [f"b · s × {k}", weight, f"b · s × {n}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def operations(model: ModelConfig, tp: int) -> dict[str, tuple[int, str, int]]:
    """Returns (input, weight, output) of each operation of the first layer, on one of tp ranks."""
    kind, found = LayerKind.of(model, 0), {}
    for name, tensors in layer(model, kind).items():
        shapes = [tensor.local_shape(tp) for tensor in tensors]
        if len(shapes[0]) == 1:
            continue
        k, n = shapes[0][1], sum(shape[0] for shape in shapes)
        found[name.removesuffix(".weight")] = k, f"{k} × {n}", n
        if name == "attention.qkv.weight":
            scores = f"scores b · {kind.heads // tp} × s × s, heads of {kind.head_size}"
            found["attention"] = n, scores, shapes[0][0]
    return found


def part() -> str:
    """Returns the generated part of docs/dryrun.md."""
    model = gpt3()
    return f"""\
{sizing(model)}

The next table has one layer, with b sequences of s tokens, on one device and on each rank of
tp={TP}. Columns of q, k, v and of the first MLP matrix are split, rows of the other two. The
residual stream keeps its width; `sp=true` splits its tokens:

{shapes(model)}
"""


if __name__ == "__main__":
    print(part(), end="")
