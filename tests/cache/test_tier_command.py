"""``specmamba cache``: what is in a folder of prefixes, and what is removed from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specmamba.cache.tiers.disk_tier import DiskTier
from specmamba.cache.tiers.tier_command import main
from specmamba.errors import ConfigError
from tests.cache.test_disk_tier import LAYOUT, TEXT, ends, flip, hash_of, put

OTHER_TEXT = tuple(range(60))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A chain of three entries, and one of another text that was used last."""
    tmp_path.chmod(0o700)
    tier = DiskTier(tmp_path, LAYOUT, 1 << 20, 1000)
    for number, text in enumerate((TEXT[:20], TEXT[:50], TEXT[:90], OTHER_TEXT)):
        entry = put(tier, text)
        tier.drain()
        os.utime(tmp_path / f"{entry.key.hex()}-{LAYOUT.fingerprint.hex()}.entry", (number, number))
    tier.close()
    return tmp_path


def listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[tuple[int, int]]:
    """Start and end of every entry, those used last first."""
    capsys.readouterr()
    assert main(["ls", str(folder), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [(line["start"], line["end"]) for line in lines if "problem" not in line]


def of_text(folder: Path, end: int) -> Path:
    """The file of the entry that ends so."""
    tier = DiskTier(folder, LAYOUT, 1 << 20, 1000)
    chain = tier.find(hash_of(tier, TEXT[:end], None, None))
    tier.close()
    return folder / f"{chain[-1].key.hex()}-{LAYOUT.fingerprint.hex()}.entry"


def test_the_newest_entry_is_listed_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(folder, capsys) == [(0, 60), (50, 90), (20, 50), (0, 20)]
    assert main(["ls", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "tokens 0 to 60" in lines[0]
    assert "1970-01-01T00:00:03Z" in lines[0]
    assert lines[-1].startswith("4 entries, ")


def test_verify_finds_damage_and_changes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(folder)]) == 0
    file = of_text(folder, 50)
    flip(file, -1)
    assert main(["verify", str(folder)]) == 1
    assert f"{file.name}: its content is not what was written" in capsys.readouterr().out
    assert len(listed(folder, capsys)) == 4


@pytest.mark.parametrize("place", [50, -1], ids=["header", "content"])
def test_prune_removes_what_is_of_no_use(place: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(of_text(folder, 50), place)  # the entry behind it is cut off
    (folder / ".1-a-0.tmp").write_bytes(b"begun")
    assert main(["prune", str(folder)]) == 0
    assert capsys.readouterr().out == "removed 2 entries and 1 unfinished files; 2 entries are left\n"
    assert listed(folder, capsys) == [(0, 60), (0, 20)]


def test_prune_to_a_size_keeps_what_was_used_last_and_whole_chains(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = sum(file.stat().st_size for file in folder.glob("*.entry"))
    assert main(["prune", str(folder), "--size", str((sizes - 1) / (1 << 30))]) == 0
    assert listed(folder, capsys) == [(0, 60), (20, 50), (0, 20)]
    assert main(["prune", str(folder), "--all"]) == 0
    assert listed(folder, capsys) == []
    tier = DiskTier(folder, LAYOUT, 1 << 20, 1000)  # the secret is still there
    put(tier, TEXT[:50])
    assert ends(tier, TEXT) == [50]
    tier.close()


def test_a_reader_that_has_read_enough(folder: Path) -> None:
    command = f"{sys.executable} -m specmamba cache ls {folder} --json"
    found = subprocess.run(f"{command} | true; echo ${{PIPESTATUS[0]}}", shell=True, executable="/bin/bash",
                           capture_output=True, text=True, check=True)  # fmt: skip
    assert (found.stdout, found.stderr) == ("0\n", "")


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        main(["ls", str(tmp_path / "none")])
    for size in ("-1", "x", "nan"):
        with pytest.raises(SystemExit):
            main(["prune", str(tmp_path), "--size", size])
