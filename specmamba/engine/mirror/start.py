"""From flags to an engine: alone, or with other ranks, which this process starts or ``torchrun`` has started."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import secrets
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specmamba.checkpoints.checkpoint import digest_of_checkpoint, resolve_checkpoint
from specmamba.config import EngineConfig
from specmamba.engine.engine import Engine
from specmamba.engine.loading import load_models, resolve_device
from specmamba.errors import ConfigError, SpecmambaError

if TYPE_CHECKING:
    from specmamba.parallel.control import FirstRankLink
    from specmamba.parallel.ranks import Ranks

logger = logging.getLogger("specmamba")

INTERFACE, LOOPBACK = "GLOO_SOCKET_IFNAME", "lo"  # over which ranks that this package starts exchange by gloo
TORCHRUN = "TORCHELASTIC_RUN_ID"  # a variable that it sets


def launched_rank(config: EngineConfig) -> int | None:
    """This process's rank where ``torchrun`` has started all of them; None: it is alone, or starts the others.

    Raises:
        ConfigError: it has started another number of ranks, or some on other machines.
    """
    if TORCHRUN not in os.environ or "RANK" not in os.environ:
        return None
    size, local = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if size == 1 and config.tp_size == 1:
        return None
    if size != config.tp_size:
        raise ConfigError(f"--tp-size {config.tp_size}: torchrun has started {size} processes: give both one number")
    if local != size:
        raise ConfigError(f"--tp-size {size}: the ranks of a model must be on one machine, and here are {local}")
    return int(os.environ["RANK"])


def build_engine(config: EngineConfig) -> Engine:
    """Load a model; with ``--tp-size``, together with the other ranks. For rank 0.

    Raises:
        SpecmambaError: as ``Engine``, or the ranks do not fit together.
    """
    if config.tp_size == 1:
        return Engine(config)
    from specmamba.engine.mirror.first_engine import FirstEngine, leave
    from specmamba.engine.mirror.rank_children import RankChildren
    from specmamba.parallel.control import RankLinks

    device = resolve_device(config.device)
    config = config.on_device(device.type)
    rank = launched_rank(config)
    if rank:
        raise ConfigError(f"rank {rank} of torchrun has no engine of its own: start specmamba serve or generate by it")
    is_launched = rank is not None
    # what cannot be divided is refused before anything is started
    load_models(resolve_checkpoint(config.model_path, config.revision), config, device, only_shapes=True)
    name = _meeting_name() if is_launched else f"specmamba-{secrets.token_hex(16)}"
    links = RankLinks(name, config.tp_size)
    children = ranks = None
    try:
        if not is_launched:
            children = RankChildren(config, name)
        store_file = None if children is None else children.store_file
        links.join(facts_of(config), store_file, children.check if children is not None else lambda: None)
        ranks = _process_ranks(0, config, device, store_file)
        links.use(ranks)
        return FirstEngine(config, ranks, links, children)
    except BaseException:
        if ranks is not None:
            leave(ranks, links)
        links.close()
        if children is not None:
            children.close()
        raise


def run_other_rank(config: EngineConfig, rank: int, name: str | None = None) -> int:
    """Be a rank other than 0 until rank 0 ends. Returns the exit status.

    ``name``: under which rank 0 listens; None: as ``torchrun`` says.
    """
    from specmamba.engine.mirror.other_engine import OtherEngine
    from specmamba.parallel.control import FirstRankLink

    logger.setLevel(logging.ERROR)  # rank 0 reports
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 finishes its requests, and then ends this process
        signal.signal(number, signal.SIG_IGN)
    device = resolve_device(config.device)
    config = config.on_device(device.type)
    link = FirstRankLink(name or _meeting_name(), rank, facts_of(config))
    ranks = None
    try:
        ranks = _process_ranks(rank, config, device, link.store_file)
        link.use(ranks)
        engine = OtherEngine(config, ranks, link)
        engine.run()
        engine.close()
        ranks.close()
    except SpecmambaError as error:
        return _end_with(link, str(error))
    except Exception as error:  # rank 0 fails too, and says why
        logger.debug("rank %d ends", rank, exc_info=True)
        return _end_with(link, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    finally:
        if ranks is not None:
            ranks.abort()  # where it is not closed yet
    return 0


def _end_with(link: FirstRankLink, message: str) -> int:
    link.fail(message)
    return 1


def _process_ranks(rank: int, config: EngineConfig, device: torch.device, store_file: str | None) -> Ranks:
    from specmamba.parallel.process_group import ProcessRanks

    if device.type == "cuda":
        if torch.cuda.device_count() < config.tp_size:
            raise ConfigError(f"--tp-size {config.tp_size}: there are {torch.cuda.device_count()} GPUs, one for a rank")
        torch.cuda.set_device(rank)
    if store_file is None or INTERFACE in os.environ:
        return ProcessRanks(rank, config.tp_size, device, store_file)
    os.environ[INTERFACE] = LOOPBACK  # read while the group is made; other groups of this process choose for themselves
    try:
        return ProcessRanks(rank, config.tp_size, device, store_file)
    finally:
        del os.environ[INTERFACE]


def _meeting_name() -> str:
    """The name under which ranks that torchrun has started meet."""
    parts = (
        os.environ.get(name, "") for name in (TORCHRUN, "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    )
    return f"specmamba-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:32]}"


def facts_of(config: EngineConfig) -> Mapping[str, str]:
    """What must be the same on all ranks, by what it is called in messages; digests of what is long.

    Raises:
        CheckpointError: a checkpoint cannot be found.
    """
    folder = resolve_checkpoint(config.model_path, config.revision)
    draft = config.speculative_draft_model_path
    flags = config.model_dump(mode="json", include=set(EngineConfig.model_fields))
    facts = {
        "version of specmamba": _digest_of_source(),
        "version of PyTorch": f"{torch.__version__} on Python {platform.python_version()}",
        "checkpoint (--model)": f"{digest_of_checkpoint(folder)} {_digest_of_tokenizer(folder)}",
        "draft (--speculative-draft-model-path)": ""
        if draft is None
        else digest_of_checkpoint(resolve_checkpoint(draft, config.speculative_draft_model_revision)),
        "set of flags": json.dumps({**flags, "model": None}, sort_keys=True),
    }
    return {what: hashlib.sha256(value.encode()).hexdigest() for what, value in facts.items()}


def _digest_of_source() -> str:
    """Of the package's source: a version number does not tell two checkouts apart."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    found = (Path(folder, name) for folder, _, names in os.walk(root, followlinks=True) for name in names)
    for file in sorted(file for file in found if file.suffix in (".py", ".cpp", ".h")):
        digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def _digest_of_tokenizer(folder: Path) -> str:
    file = folder / "tokenizer.json"
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
