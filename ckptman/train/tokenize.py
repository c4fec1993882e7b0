"""Turn text files into a token file, as a CPU job of its own: `python -m ckptman.train.tokenize OUT SOURCES...`.

A byte-level BPE is trained on the text, and the files are encoded by several threads, both by the `tokenizers` library.
The result is the same for any number of threads: files are taken in sorted order, each is one document that ends with
the end-of-text token, and the pieces that are encoded apart are cut by content. Everything is written under a temporary
name next to OUT and renamed at the end, so that OUT is whole or not there.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ckptman.errors import CkptmanError, ConfigError, ExistsError, NotFoundError
from ckptman.storage.io.checksums import BlockDigester
from ckptman.storage.io.durable_files import DISK
from ckptman.train.dataset.tokenfile import META, TOKENIZER, TOKENS, TokenMeta, dtype_for

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCAB = 257
"""256 bytes and the end-of-text token."""
_PIECE_CHARACTERS = 1 << 20


def tokenize(
    out: Path,
    sources: Sequence[Path],
    *,
    vocab_size: int = 16_384,
    workers: int | None = None,
    glob: str = "*",
    exclude: Sequence[str] = (),
    train_bytes: int = 64 << 20,
    say: Callable[[str], None] = lambda line: None,
) -> TokenMeta:
    """Tokenise files, and all files below folders that match `glob`, into the new folder `out`.

    Folders below a source whose name is in `exclude` are left out. The BPE is trained on every n-th file so that about
    `train_bytes` are read for it. Undecodable bytes become U+FFFD. `workers` threads encode: as many as there are cores
    for this process unless given; the first call in a process decides.

    Raises ConfigError, NotFoundError (a source that is not there), ExistsError (`out` is there already).
    """
    if vocab_size < SMALLEST_VOCAB:
        raise ConfigError(f"--vocab-size {vocab_size}: a byte-level vocabulary has at least {SMALLEST_VOCAB} tokens")
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers {workers}: give at least 1, or leave it out for one per core")
    if train_bytes < 1:
        raise ConfigError(f"--train-bytes {train_bytes}: give at least 1")
    if os.path.lexists(out):
        raise ExistsError(f"{out} is there already and is not overwritten; remove it, or give another name")
    files = find_files(sources, glob, exclude)
    workers = workers or len(os.sched_getaffinity(0))
    os.environ["RAYON_NUM_THREADS"], os.environ["TOKENIZERS_PARALLELISM"] = str(workers), str(workers > 1).lower()
    total_bytes = sum(file.stat().st_size for file in files)
    say(f"{len(files)} files, {total_bytes / 1e6:.1f} MB; training a vocabulary of up to {vocab_size} tokens")
    tokenizer = _train_bpe(files[:: max(1, -(-total_bytes // train_bytes))], vocab_size)

    DISK.make_folders(out.absolute().parent)
    temporary = out.absolute().with_name(f"{out.name}.tmp-{os.getpid()}-{os.urandom(4).hex()}")
    DISK.make_folder(temporary)
    try:
        say(f"encoding, {workers} at a time")
        dtype = dtype_for(tokenizer.get_vocab_size())
        DISK.write_file(temporary / TOKENIZER, tokenizer.to_str(pretty=True).encode())
        count, digest = _encode_files(files, tokenizer, dtype, workers, temporary / TOKENS)
        meta = TokenMeta(
            dtype=dtype,
            count=count,
            vocab_size=tokenizer.get_vocab_size(),
            eos_id=tokenizer.token_to_id(END_OF_TEXT),
            sources=len(files),
            digest=digest,
        )
        DISK.write_file(temporary / META, (meta.model_dump_json(indent=1) + "\n").encode())
        DISK.sync_folder(temporary)
        if os.path.lexists(out):
            raise ExistsError(f"{out} was made by somebody else meanwhile and is not overwritten")
        DISK.rename(temporary, out.absolute())
        DISK.sync_folder(out.absolute().parent)
    except BaseException:
        DISK.remove_tree(temporary)
        raise
    return meta


def find_files(sources: Sequence[Path], glob: str = "*", exclude: Sequence[str] = ()) -> list[Path]:
    """Return the files to tokenise, sorted, each once, none empty: those named, and those below folders that match.

    Files below a folder named in `exclude` are left out.

    Raises NotFoundError for a source that is not there, ConfigError when nothing is left.
    """
    found: set[Path] = set()  # of resolved paths: a file that is named twice is one document
    for source in sources:
        if source.is_dir():
            found.update(
                path.resolve()
                for path in source.rglob(glob)
                if path.is_file() and not set(exclude).intersection(path.relative_to(source).parent.parts)
            )
        elif source.is_file():
            found.add(source.resolve())
        else:
            raise NotFoundError(f"no file or folder {source} to tokenise")
    files = sorted(path for path in found if path.stat().st_size)
    if not files:
        seen = f"{len(found)} files, all of them empty" if found else f"no files that match {glob!r}"
        raise ConfigError(
            f"nothing to tokenise: {seen} in {', '.join(map(str, sources)) or 'an empty list of sources'}"
        )
    return files


def read_pieces(file: Path) -> Iterator[str]:
    """Yield the text of a file in pieces that end with a line, so that a file of any size needs little memory."""
    with file.open(encoding="utf-8", errors="replace", newline="") as text:
        while piece := text.read(_PIECE_CHARACTERS):
            yield piece + text.readline()


def _train_bpe(files: Sequence[Path], vocab_size: int) -> Any:
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise ConfigError(
            f"tokenising needs the tokenizers library ({error}); install it with: pip install 'ckptman[train]'"
        ) from error

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for file in files for piece in read_pieces(file)), trainer)
    return tokenizer


def _encode_files(files: Sequence[Path], tokenizer: Any, dtype: str, workers: int, target: Path) -> tuple[int, str]:
    """Encode all files into `target`; returns the number of tokens and the digest of the bytes."""
    tokenizer.encode_special_tokens = True  # text that happens to contain "<|endoftext|>" must not end a document
    end = tokenizer.token_to_id(END_OF_TEXT)
    digester, count = BlockDigester(), 0
    with target.open("wb") as out:
        for batch in _batches(files, workers * _PIECE_CHARACTERS):
            for encoded in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                ids = np.array(encoded.ids or [end], np.dtype(dtype).newbyteorder("<"))
                digester.update(ids.tobytes())
                out.write(ids.tobytes())
                count += len(ids)
        out.flush()
        DISK.sync_file(out.fileno())
    return count, digester.finish()


def _batches(files: Sequence[Path], characters: int) -> Iterator[list[str]]:
    """Yield the pieces of all files, with an empty one after each file, in lists of about so many characters."""
    batch: list[str] = []
    held = 0
    for file in files:
        for piece in chain(read_pieces(file), [""]):
            batch.append(piece)
            held += len(piece)
            if held >= characters:
                yield batch
                batch, held = [], 0
    yield batch


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ckptman.train.tokenize", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("out", type=Path, help="the folder to make")
    parser.add_argument("sources", type=Path, nargs="+", help="text files, and folders that are searched for them")
    parser.add_argument("--vocab-size", type=int, default=16_384, help="at most this many tokens (default 16384)")
    parser.add_argument("--workers", type=int, default=None, help="threads (default: one per core)")
    parser.add_argument("--glob", default="*", help="which files of a folder, for example '*.py' (default: all)")
    parser.add_argument(
        "--exclude", action="append", default=[], metavar="NAME", help="leave out folders of this name (repeatable)"
    )
    parser.add_argument(
        "--train-bytes", type=int, default=64 << 20, help="text the vocabulary is trained on, about (default 64 MiB)"
    )
    options = parser.parse_args(arguments)
    # SIGTERM as an exception, so that the temporary folder is removed on the way out.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        meta = tokenize(**vars(options), say=print)
    except (CkptmanError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, CkptmanError) else 1
    print(
        f"{options.out}: {meta.count} tokens of {meta.sources} files, vocabulary {meta.vocab_size}, {meta.dtype}, "
        f"{meta.count * meta.item_bytes / 1e6:.1f} MB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
