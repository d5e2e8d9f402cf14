"""The flags of `cs336 tokenize`. Standard library only: mistakes are reported at once."""

from dataclasses import dataclass

from cs336_systems.config import UserError, flag

MOST_WORKERS = 1024
SMALLEST_VOCABULARY, LARGEST_VOCABULARY = 257, 1 << 24
"""Bounds of a trained vocabulary: all bytes and the end of a document; 16 million tokens."""


@dataclass(frozen=True)
class TokenizeArguments:
    inputs: tuple[str, ...] = flag(
        (),
        "files, folders or patterns: .txt, .md, .jsonl, .jsonl.gz, tokens as .npy or .bin (16-bit)",
        positional=True,
        metavar="INPUT",
    )
    output: str = flag("", "folder to write; an unfinished one is continued", short="-o")
    tokenizer: str | None = flag(None, "tokenizer.json, or a folder with one", excludes=("train_tokenizer",))
    train_tokenizer: int | None = flag(None, "train a byte-level BPE tokenizer with this many tokens on the inputs")
    text_field: str = flag("text", "field of JSON lines that holds the document")
    separator: str = flag(
        "<|endoftext|>", "text between documents of a text file ('': a file is one)", may_be_empty=True
    )
    end_token: str = flag("", "token added after each document, or none (default: the tokenizer's own)")
    parse_special_tokens: bool = flag(False, "read names of special tokens in documents as these tokens, not as text")
    workers: int | None = flag(None, "processes (default: one for each core)")
    force: bool = flag(False, "write the folder again: one of other inputs or settings, or a damaged one")

    def __post_init__(self) -> None:
        if not self.inputs:
            raise UserError("name files to tokenize: cs336 tokenize stories.txt --output data/stories")
        if not self.output:
            raise UserError("name a folder to write: --output data/stories")
        if self.tokenizer is None and self.train_tokenizer is None:
            raise UserError("name a tokenizer: --tokenizer tokenizer.json, or --train_tokenizer 32000 to train one")
        for name, least, most in (
            ("workers", 1, MOST_WORKERS),
            ("train_tokenizer", SMALLEST_VOCABULARY, LARGEST_VOCABULARY),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise UserError(f"--{name} must be between {least} and {most}, got {value}")
