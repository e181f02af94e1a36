"""``specmamba cache``: look at a folder of prefixes, make it smaller, verify it. Servers may use it meanwhile."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from specmamba.cache.tiers.codec import EntryError, Header, check_payload, read_header
from specmamba.cache.tiers.entry_folder import EntryFile, EntryFolder
from specmamba.cache.tiers.entry_index import EntryIndex, Name, Stored
from specmamba.errors import ConfigError

PROG = "specmamba cache"
GIB = 1 << 30


def main(arguments: list[str]) -> int:
    """Run ``ls``, ``prune`` or ``verify``. Returns 0, or 1 where ``verify`` finds damage. Raises ConfigError."""
    options = _parser().parse_args(arguments)
    if not options.folder.is_dir():
        raise ConfigError(f"there is no folder {options.folder}: give the one of --hicache-storage-dir")
    try:
        status = int(options.run(EntryFolder(options.folder), options))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # of head and the like, which have read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        raise ConfigError(f"{options.folder} cannot be used: {error.strerror}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(PROG, description="Prefixes on disk: the folder of --hicache-storage-dir.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    listing = _add(commands, "ls", _list, "list its entries, those used last first")
    listing.add_argument("--json", action="store_true", help="one JSON object a line")
    what = "damaged, cut off or left by killed writers"
    pruning = _add(commands, "prune", _prune, f"read all entries, and remove what is {what}")
    pruning.add_argument("--size", type=_size, metavar="GIB", help="then what is oldest, until the rest fits")
    pruning.add_argument("--all", action="store_true", help="every entry")
    _add(commands, "verify", _verify, "read all entries and compare them with their digests")
    return parser


def _size(text: str) -> float:
    if not (size := float(text)) >= 0:
        raise ValueError
    return size


def _add(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.set_defaults(run=run)
    return parser


def _headers(folder: EntryFolder) -> Iterator[tuple[EntryFile, Header | EntryError]]:
    """Iterate over all files and their headers; those that another process removes meanwhile are left out."""
    for file in sorted(folder.list(), key=lambda file: file.used, reverse=True):
        try:
            header, nbytes = folder.header(file.name)
            file = replace(file, nbytes=nbytes)
            yield file, header
        except FileNotFoundError:
            continue
        except EntryError as error:
            yield file, error


def _entries(folder: EntryFolder) -> Iterator[tuple[EntryFile, Header | EntryError]]:
    """As ``_headers``, with all contents compared with their digests."""
    for file, header in _headers(folder):
        if isinstance(header, EntryError):
            yield file, header
            continue
        try:
            with folder.read(file.name) as stream:
                check_payload(stream, read_header(stream))
            yield file, header
        except FileNotFoundError:
            continue
        except EntryError as error:
            yield file, error


def _list(folder: EntryFolder, options: argparse.Namespace) -> int:
    num_entries = num_bytes = 0
    for file, header in _headers(folder):
        num_entries, num_bytes = num_entries + 1, num_bytes + file.nbytes
        described = _describe(file, header)
        print(json.dumps(described) if options.json else _line(described))
    if not options.json:
        print(f"{num_entries} entries, {num_bytes / GIB:.3f} GiB")
    return 0


def _describe(file: EntryFile, header: Header | EntryError) -> dict[str, object]:
    fingerprint, key = file.name
    common = {
        "key": key.hex(),
        "fingerprint": fingerprint.hex(),
        "bytes": file.nbytes,
        "used": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(file.used / 1e9)),
    }
    if isinstance(header, EntryError):
        return common | {"problem": str(header)}
    return common | {"start": header.start, "end": header.end, "model": _model(header)}


def _model(header: Header) -> str:
    """Return what the layout says of the model."""
    try:
        identity = json.loads(header.layout)["identity"]
        return " ".join(str(identity[name]) for name in ("architecture", "dtype", "draft") if name in identity)
    except (ValueError, KeyError, TypeError, RecursionError):
        return "unknown"


def _line(described: dict[str, object]) -> str:
    what = described.get("problem") or f"tokens {described['start']} to {described['end']}, {described['model']}"
    mib = int(str(described["bytes"])) / (1 << 20)
    return f"{str(described['key'])[:12]}  {described['used']}  {mib:8.1f} MiB  {what}"


def _prune(folder: EntryFolder, options: argparse.Namespace) -> int:
    index, doomed = EntryIndex(), list[Name]()
    for file, header in _headers(folder) if options.all else _entries(folder):
        if options.all or (isinstance(header, EntryError) and header.fault == "damaged"):
            doomed.append(file.name)
        elif isinstance(header, Header):
            index.add(Stored.of(header, file.nbytes, file.used))
        else:  # of another format: its size counts
            index.add(Stored(*file.name, b"", 0, 0, 0, 0, file.nbytes, file.used))
    doomed += _cut_off(index)
    while options.size is not None and index.num_bytes > options.size * GIB:
        oldest = index.oldest()
        assert oldest is not None
        index.remove(oldest.name)
        doomed.append(oldest.name)
    for name in doomed:
        folder.remove(name)
    leftovers = folder.remove_leftovers()
    print(f"removed {len(doomed)} entries and {leftovers} unfinished files; {len(index)} entries are left")
    return 0


def _cut_off(index: EntryIndex) -> list[Name]:
    """Remove the entries whose beginning is gone from an index; returns their names."""
    names: list[Name] = []
    for entry in sorted(index, key=lambda entry: entry.start):
        if entry.start and index.get((entry.fingerprint, entry.parent)) is None:
            index.remove(entry.name)
            names.append(entry.name)
    return names


def _verify(folder: EntryFolder, _options: argparse.Namespace) -> int:
    num_good = num_bad = 0
    for file, header in _entries(folder):
        if isinstance(header, EntryError):
            num_bad += 1
            print(f"{folder.file(file.name).name}: {header}")
        else:
            num_good += 1
    print(f"{num_good} entries are whole, {num_bad} are not")
    return 1 if num_bad else 0
