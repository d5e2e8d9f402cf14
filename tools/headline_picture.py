"""Draws docs/images/headline.png, the first picture of the READMEs, from the records of results/h200.

python tools/headline_picture.py
"""

from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from cs336_systems.record import load
from cs336_systems.report.cells import CellView, group

ROOT = Path(__file__).resolve().parent.parent
OURS, RIVAL, GREY = "#0072b2", "#b8b8b8", "#555555"


def attention_times(cells: list[CellView]) -> dict[str, float]:
    """Median ms of forward and backward of 16 heads, 16,384 tokens, head dim 128, causal."""
    shape = {"batch_size": 1, "heads": 16, "seq_len": 16384, "head_dim": 128, "is_causal": True}
    [cell] = [
        cell
        for cell in cells
        if cell.experiment == "attention_rivals" and all(cell.get(name) == value for name, value in shape.items())
    ]
    names = {
        "flash_hopper": "cs336_systems",
        "flash_attention_4": "FlashAttention-4",
        "sdpa_cudnn": "cuDNN",
        "sdpa_flash": "FlashAttention-2 (SDPA)",
    }
    return {label: 1e3 * (cell.variant(name).median("forward_backward_time") or 0.0) for name, label in names.items()}


def step_times(cells: list[CellView], size: str) -> dict[str, float]:
    """Mean ms of a training step of `size`, 4 x 512 tokens, bf16."""
    found: dict[str, float] = {}
    for cell in cells:
        if cell.experiment != "fast_step" or cell.get("size") != size or cell.get("batch_size") != 4:
            continue
        time = 1e3 * (cell.value("step_time") or 0.0)
        if cell.get("model_factory"):
            found["compiled Llama"] = time
        elif cell.get("fast") == "on":
            found["cs336_systems"] = time
        elif cell.get("fast") == "off" and not cell.get("compile"):
            found["eager PyTorch"] = time
    return {name: found[name] for name in sorted(found, key=found.__getitem__)}


def draw(axes: Axes, title: str, times: Mapping[str, float]) -> None:
    names = list(times)
    values = list(times.values())
    bars = axes.barh(names, values, color=[OURS if name == "cs336_systems" else RIVAL for name in names], height=0.62)
    axes.bar_label(
        bars,
        labels=[f"{value:.{2 if value < 10 else 1}f} ms" for value in values],
        padding=4,
        fontsize=10,
        color="#222222",
    )
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=11, pad=8)
    axes.set_xlim(0, max(values) * 1.25)
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0, labelsize=10)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color(GREY)


def main() -> None:
    cells = group(load(ROOT / "results" / "h200" / "records.jsonl").records)
    panels = {
        "Attention, forward + backward\n16 heads, 16,384 tokens, d 128, causal": attention_times(cells),
        "Training step, 129 M parameters\n4 x 512 tokens": step_times(cells, "small"),
        "Training step, 3.4 B parameters\n4 x 512 tokens": step_times(cells, "2.7B"),
    }
    figure, all_axes = plt.subplots(1, 3, figsize=(12, 2.5), dpi=130, layout="constrained")
    for axes, (title, times) in zip(all_axes, panels.items(), strict=True):
        draw(axes, title, times)
    figure.suptitle(
        "One H200, bf16, rivals in the same run (lower is better)", x=0.008, ha="left", fontsize=10, color=GREY
    )
    figure.savefig(ROOT / "docs" / "images" / "headline.png", facecolor="white")


if __name__ == "__main__":
    main()
