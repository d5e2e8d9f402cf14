"""transformers' Llama with the FP8 linear layers of torchao, a rival of our FP8 step.

    cs336 bench --model cs336_systems.experiments.steps.float8_llama:rowwise --compile --precision bf16

Neither transformers nor torchao is installed with this package.
"""

import importlib
from typing import Any

from cs336_systems.experiments.steps import llama


def tensorwise(**shape: Any) -> Any:
    """Build the Llama with one FP8 scale per tensor."""
    return _converted("tensorwise", shape)


def rowwise(**shape: Any) -> Any:
    """Build the Llama with one FP8 scale per row of an operand."""
    return _converted("rowwise", shape)


def _converted(recipe: str, shape: dict[str, Any]) -> Any:
    """Return the Llama whose linear layers, except the head, compute in FP8."""
    float8 = importlib.import_module("torchao.float8")
    model = llama.build(**shape)
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    return float8.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: not name.endswith("lm_head")
    )
