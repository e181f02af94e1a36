"""One rank of several that do the same jobs: ``python -m tests.parallel.rank_program RANK SIZE FOLDER``.

The folder has ``jobs.json``, and gets the rank's answers, ``rank-RANK.json``: by the name of a job what it gave, or the
message of its error.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from specmamba.errors import SpecmambaError
from specmamba.parallel.process_group import ProcessRanks
from tests.parallel.jobs import run_job


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    ranks = ProcessRanks(rank, size, torch.device("cpu"), str(folder / "store"))
    found = {}
    for job in json.loads((folder / "jobs.json").read_text()):
        try:
            found[job["name"]] = run_job(job, ranks)
        except SpecmambaError as error:
            found[job["name"]] = {"error": str(error)}
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    ranks.close()


if __name__ == "__main__":
    main()
