"""Days and money of a training run, from its tokens and the tokens per second of its steps. No torch."""

import re
from dataclasses import dataclass
from typing import NamedTuple

from cs336_systems.config import UserError, flag
from cs336_systems.table import Column
from cs336_systems.text import Text, say

FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
MOST_TOKENS, HIGHEST_PRICE = 1e18, 1e9
DAY, HOURS_OF_A_DAY = 86_400, 24
NUMBER = r"(\d{1,30}(?:\.\d{1,30})?(?:e\+?\d{1,3})?)"


@dataclass(frozen=True)
class CostArguments:
    """Flags that turn tokens per second into days and money."""

    train_tokens: str = flag("", "tokens to train on, such as 300B or 1e9: shows the days that they take")
    price: str = flag("", "price of a GPU hour, such as 2.5 or 2.5/h: shows what these days cost")

    def cost(self) -> "Cost":
        """Return the tokens and the price; raise UserError for an invalid number of tokens or price."""
        if self.price and not self.train_tokens:
            raise UserError(f"--price {self.price} needs the length of the run; add --train_tokens, such as 300B")
        tokens = parse_tokens(self.train_tokens) if self.train_tokens else None
        return Cost(tokens, parse_price(self.price) if self.price else None)


def parse_tokens(text: str) -> float:
    """Return the number of tokens in a text such as `300B`, `1.5T`, `1e9` or `20,000,000`."""
    found = re.fullmatch(rf"{NUMBER}([kmbt]?)", text.strip().lower().replace(",", "").replace("_", ""))
    number = float(found[1]) * FACTORS[found[2]] if found else 0.0
    if not 1 <= number <= MOST_TOKENS:
        raise UserError(f"--train_tokens {text!r} is not a number of tokens; use one such as 300B, 1.5T or 1e9")
    return number


def parse_price(text: str) -> float:
    """Return the price in a text such as `2.5` or `2.5/h`."""
    found = re.fullmatch(rf"{NUMBER}\s*(?:/\s*h)?", text.strip().lower())
    number = float(found[1]) if found else 0.0
    if not 0 < number <= HIGHEST_PRICE:
        raise UserError(f"--price {text!r} is not the price of a GPU hour; use one such as 2.5 or 2.5/h")
    return number


class Cost(NamedTuple):
    """Tokens of a run and price of a GPU hour, if given."""

    tokens: float | None = None
    price: float | None = None

    @property
    def columns(self) -> list[Column]:
        names = [(self.tokens, Text("days", "天数")), (self.price, Text("cost", "费用"))]
        return [Column(name) for asked, name in names if asked is not None]

    def cells(self, tokens_per_second: float, gpus: int = 1) -> list[str]:
        """Return the texts of `columns` for steps at this rate on all GPUs together."""
        if self.tokens is None:
            return []
        days = self.tokens / tokens_per_second / DAY
        return [short(days), *([short(days * HOURS_OF_A_DAY * gpus * self.price)] if self.price is not None else [])]

    @property
    def notes(self) -> list[Text]:
        if self.tokens is None:
            return []
        tokens = f"{self.tokens:,.0f}"
        if self.price is None:
            return [say("days: {} tokens", "天数：{} token", tokens)]
        price = f"{self.price:g}"
        return [say("days and cost: {} tokens, {} a GPU hour", "天数与费用：{} token，每 GPU 小时 {}", tokens, price)]


NO_COST = Cost()
"""Neither days nor money were asked for."""


def short(number: float) -> str:
    """Return a number as text with at least two digits, and with one decimal below 100: a deadline may decide."""
    return f"{number:,.0f}" if number >= 99.95 else f"{number:.1f}" if number >= 0.995 else f"{number:.2g}"
