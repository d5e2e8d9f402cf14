"""Instruments on number formats: accumulation in different precisions, and dtypes under autocast."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cs336_systems.config import ModelConfig
from cs336_systems.model import TransformerLM
from cs336_systems.record import Metric

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def measure_accumulation(config: dict[str, Any]) -> list[Metric]:
    """Add `count` terms of `value` to an accumulator, one at a time."""
    total = torch.tensor(0, dtype=DTYPES[config["accumulator"]])
    term = torch.tensor(config["value"], dtype=DTYPES[config["term"].split()[0]])
    if config["term"].endswith("cast to fp32"):
        term = term.to(torch.float32)  # keeps the rounding to fp16
    for _ in range(config["count"]):
        total += term
    return [Metric("sum", "1", [total.item()]), Metric("term", "1", [term.item()])]


class ToyModel(nn.Module):
    """The handout's toy model: fc1 -> relu -> LayerNorm -> fc2."""

    def __init__(self, d_in: int = 20, d_out: int = 5):
        super().__init__()
        self.fc1 = nn.Linear(d_in, 10, bias=False)
        self.ln = nn.LayerNorm(10)
        self.fc2 = nn.Linear(10, d_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.ln(F.relu(self.fc1(x))))


def measure_dtypes(config: dict[str, Any]) -> list[Metric]:
    """Record the dtypes of parameters, outputs, logits, loss and gradients of one step by hooks."""
    device = torch.device(config["device"])
    model, inputs, targets = _toy(device) if config["model"] == "toy" else _transformer(device)
    seen: dict[str, str] = {"parameters": _name(next(model.parameters()))}
    for name, module in model.named_modules():
        if not list(module.children()) and (name.startswith("layers.0.") or "layers" not in name):
            module.register_forward_hook(_remember(seen, f"{name} output"))
    with torch.autocast(device.type, DTYPES[config["autocast"]]):
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
    loss.backward()
    gradient = next(p.grad for p in model.parameters() if p.grad is not None)
    seen |= {"logits": _name(logits), "loss": _name(loss), "gradients": _name(gradient)}
    return [Metric("dtype", "", [dtype], variant=tensor) for tensor, dtype in seen.items()]


def _toy(device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
    return ToyModel().to(device), torch.randn(8, 20, device=device), torch.randint(5, (8,), device=device)


def _transformer(device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
    shape = ModelConfig(vocab_size=64, context_length=16, d_model=32, num_layers=1, num_heads=2, d_ff=64)
    tokens = torch.randint(64, (2, 16), device=device)
    return TransformerLM(shape, attention="reference").to(device), tokens, tokens


def _remember(seen: dict[str, str], what: str) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        seen.setdefault(what, _name(output))

    return hook


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
