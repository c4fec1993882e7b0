"""The token file on disk: one folder with `tokens.bin`, `meta.json` and `tokenizer.json`.

`tokens.bin` is nothing but little-endian token ids one after the other, documents joined by the end-of-text id, so
that any program can map it. `meta.json` says how to read it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pydantic
from pydantic import BaseModel, ConfigDict

from ckptman.errors import ConfigError, CorruptError, FormatVersionError, NotFoundError
from ckptman.storage.io.safe_open import read_regular

TOKENS, META, TOKENIZER = "tokens.bin", "meta.json", "tokenizer.json"
FORMAT_VERSION = 1
_MOST_META_BYTES = 1024 * 1024


class TokenMeta(BaseModel):
    """What `meta.json` says. `digest` is the xxh3-128 of tokens.bin by blocks (see ckptman.storage.io.checksums)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: int = FORMAT_VERSION
    dtype: Literal["uint16", "uint32"]
    count: int
    vocab_size: int
    eos_id: int
    sources: int
    digest: str

    @property
    def item_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize


def dtype_for(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The smallest of the two kinds that holds every id."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def read_meta(folder: Path) -> TokenMeta:
    """The checked meta.json of a token folder; the size of tokens.bin is compared, its bytes are not read.

    Raises NotFoundError, FormatVersionError, CorruptError.
    """
    remedy = f"make it with: python -m ckptman.train.tokenize {folder} FILES_OR_FOLDERS..."
    try:
        data = read_regular(folder / META, _MOST_META_BYTES, follow=True, remedy=remedy)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"{folder} is not a token folder (it has no {META}); {remedy}") from None
    try:
        document = pydantic.TypeAdapter(dict[str, Any]).validate_json(data)
        if (version := document.get("format_version")) != FORMAT_VERSION and isinstance(version, int):
            raise FormatVersionError(str(folder / META), version, FORMAT_VERSION)
        meta = TokenMeta.model_validate(document)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise CorruptError(f"{folder / META} cannot be read ({first['loc']}: {first['msg']}); {remedy}") from error
    try:
        size_bytes = (folder / TOKENS).stat().st_size
    except FileNotFoundError:
        raise CorruptError(f"{folder} has no {TOKENS}; {remedy}") from None
    if size_bytes != meta.count * meta.item_bytes:
        raise CorruptError(
            f"{folder / TOKENS} has {size_bytes} bytes and should have {meta.count * meta.item_bytes}; {remedy}"
        )
    return meta


def sample_count(folder: Path, meta: TokenMeta, sequence_tokens: int) -> int:
    """How many samples of `sequence_tokens` (and the target after the last) there are. Raises ConfigError for none."""
    samples = (meta.count - 1) // sequence_tokens
    if samples < 1:
        raise ConfigError(
            f"data.sequence_tokens: {folder} has {meta.count} tokens, and a sample of {sequence_tokens} needs one more "
            f"than that; shorten the sequence or tokenise more text"
        )
    return samples


def map_tokens(folder: Path, meta: TokenMeta) -> np.ndarray[Any, Any]:
    """The tokens as a read-only array of shape [count], mapped: nothing is read until it is looked at."""
    return np.memmap(folder / TOKENS, dtype=np.dtype(meta.dtype).newbyteorder("<"), mode="r", shape=(meta.count,))
