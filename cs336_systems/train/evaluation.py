"""Validation loss, and text sampled from the model. Neither changes the run."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from cs336_systems.parallel.collectives import communication_device
from cs336_systems.parallel.launch import Rank
from cs336_systems.step import TrainStep
from cs336_systems.train.data import Corpus
from cs336_systems.train.settings import TrainSettings


@dataclass(frozen=True)
class Evaluator:
    settings: TrainSettings
    rank: Rank
    corpus: Corpus
    step: TrainStep

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Return the mean loss over the micro batches of all ranks."""
        count, size = self.settings.log.eval_batches, self.settings.data.micro_batch_size
        total = torch.zeros((), dtype=torch.float64, device=communication_device())
        for number in range(count):
            first = (number * self.rank.world_size + self.rank.rank) * size
            inputs, targets = self.corpus.validation(first, size)
            total += self.step.evaluate(inputs.to(self.rank.device), targets.to(self.rank.device)).to(total)
        dist.all_reduce(total)
        return total.item() / (count * self.rank.world_size)

    @torch.no_grad()
    def sample(self, prompt: str, count: int) -> str:
        """Continue the prompt by `count` bytes, each drawn from the model's distribution. For all ranks together."""
        model = self.settings.model
        tokens = [byte for byte in prompt.encode() if byte < model.vocab_size] or [0]
        generator = torch.Generator().manual_seed(self.settings.seed)  # the run's own random state stays as it is
        for _ in range(count):
            recent = torch.tensor([tokens[-model.context_length :]], device=self.rank.device)
            with self.step.autocast():  # not compiled: every prefix has another length
                logits = self.step.model(recent)[0, -1, :256].float().cpu()
            if not logits.isfinite().all():
                return "(the model's logits are not finite)"
            tokens.append(int(torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=generator)))
        return bytes(tokens).decode(errors="replace")
