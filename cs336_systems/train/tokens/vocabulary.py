"""The tokenizer of `cs336 tokenize`: a given or trained tokenizer.json, used by the library `tokenizers`.

The file is data: the library parses it and runs none of it. Text never becomes a special token, such as the one that
ends a document, unless requested.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from cs336_systems.config import LARGEST_NUMBER, UserError
from cs336_systems.files import LARGEST_FILE, read_input, reason_of

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<|end▁of▁sentence|>", "</s>", "<eos>", "[SEP]")
"""Names of the token that ends a document in published tokenizers."""


class Vocabulary:
    """A tokenizer, parsed from the bytes of its tokenizer.json."""

    def __init__(self, content: bytes, name: str, *, end_token: str = "", parses_special: bool = False):
        """Parse the file; raise UserError if it is damaged. `end_token` "none" adds no token to documents."""
        self.content = content
        self._name = name
        with _reported(f"{name!r} is not a tokenizer.json"):
            self._tokenizer = _library().Tokenizer.from_buffer(content)
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            self._tokenizer.encode_special_tokens = not parses_special
        if not 0 < self.size <= LARGEST_NUMBER:
            raise UserError(f"{name!r} has a vocabulary of {self.size} tokens")
        self.end_token = self._end_token(end_token)

    @cached_property
    def size(self) -> int:
        """The largest token plus 1: a vocabulary may have gaps."""
        with _reported(f"{self._name!r} is not a tokenizer.json"):
            return max(self._tokenizer.get_vocab().values(), default=-1) + 1

    @cached_property
    def hash(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def _end_token(self, asked: str) -> int | None:
        if asked == "none":
            return None
        names = (asked,) if asked else END_TOKENS
        found = (self._tokenizer.token_to_id(name) for name in names)
        if (token := next((token for token in found if token is not None), None)) is None:
            which = repr(asked) if asked else f"any of {', '.join(END_TOKENS)}"
            raise UserError(f"{self._name!r} has no token {which}; --end_token names the one that ends a document")
        return token

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the tokens of each text."""
        with _reported(f"{self._name!r} cannot tokenize a text"):
            return [found.ids for found in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def read_tokenizer(path: Path) -> bytes:
    """Return the bytes of a tokenizer.json, or of the one in a folder."""
    return read_input(path / "tokenizer.json" if path.is_dir() else path, LARGEST_FILE)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> bytes:
    """Return a tokenizer.json of byte-level BPE trained on texts; it depends only on the texts and the size."""
    library = _library()
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = library.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKENS[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with _reported("the tokenizer cannot be trained"):
        tokenizer.train_from_iterator(texts, trainer)
        return tokenizer.to_str(pretty=True).encode()


def one_thread() -> None:
    """Limit the library to one thread in this process: there is one process for each core."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _library() -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise UserError("cs336 tokenize needs the package tokenizers: pip install 'tokenizers>=0.21'") from None
    return tokenizers


@contextlib.contextmanager
def _reported(problem: str) -> Iterator[None]:
    """Turn an error of the library, which may also panic, into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{problem}: {reason_of(error)}") from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{problem}: {reason_of(error)}") from None
