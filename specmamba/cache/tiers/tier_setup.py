"""The tiers below a prefix cache: which the flags ask for, and how large they are."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

import torch

from specmamba.cache.kv_pool import KVPool
from specmamba.cache.memory import MemoryPlan, free_memory
from specmamba.cache.prefix import MambaRadixCache
from specmamba.cache.state_pool import StatePool
from specmamba.cache.tiers.disk_tier import DiskTier
from specmamba.cache.tiers.entry import EntryLayout
from specmamba.cache.tiers.entry_folder import SECRET_BYTES, EntryFolder
from specmamba.cache.tiers.host_tier import HostTier
from specmamba.cache.tiers.pool_transfer import PoolTransfer
from specmamba.cache.tiers.prefix_hash import PrefixHasher
from specmamba.cache.tiers.prefix_tiers import PrefixTiers
from specmamba.cache.tiers.store.object_store import open_store, require_store
from specmamba.cache.tiers.store.store_settings import StoreKeys, StoreSettings
from specmamba.cache.tiers.store.store_tier import StoreTier
from specmamba.cache.tiers.tier import Tier
from specmamba.config import EngineConfig
from specmamba.errors import ConfigError

GIB = 1 << 30
GPU_RATIO = 2.0  # of host memory to the pools, with --enable-hierarchical-cache: SGLang's


def require_storage(config: EngineConfig) -> None:
    """Raise ConfigError if there is a place for prefixes that cannot be used; a folder is made if need be."""
    if config.hicache_storage_dir is not None:
        EntryFolder.open(config.hicache_storage_dir.expanduser())
    if config.hicache_storage_backend == "mooncake":
        _store_keys(config)
        require_store(StoreSettings.of(config.hicache_storage_backend_extra_config))


def build_tiers(
    config: EngineConfig,
    plan: MemoryPlan,
    cache: MambaRadixCache,
    kv: KVPool,
    states: StatePool,
    identity: Callable[[], Mapping[str, str]],
) -> PrefixTiers | None:
    """Put the tiers that the flags ask for below a prefix cache; None: they ask for none.

    Args:
        config: the flags.
        plan: sizes of the pools.
        cache: the tree, on these pools.
        kv, states: the pools.
        identity: returns that of the model, as ``EntryLayout`` has it; called where there are tiers only.

    Raises:
        ConfigError: the folder or the store cannot be used, or there is not so much host memory.
    """
    device = states.recurrent.device
    num_bytes = _host_bytes(config, plan, device)
    has_store = config.hicache_storage_backend == "mooncake"
    if config.hicache_storage_dir is None and not has_store and not num_bytes:
        return None
    transfer = new_transfer(config, kv, states, identity())
    secret, tiers = secrets.token_bytes(SECRET_BYTES), list[Tier]()
    if num_bytes:
        tiers.append(HostTier(transfer.layout, num_bytes, is_pinned=device.type == "cuda"))
    if config.hicache_storage_dir is not None:
        disk = DiskTier(
            config.hicache_storage_dir.expanduser(),
            transfer.layout,
            int(config.hicache_storage_size * GIB),
            plan.context_length,
            config.hicache_write_policy,
        )
        secret = disk.secret
        tiers.append(disk)
    if has_store:
        secret = _store_keys(config).texts
        tiers.append(_open_store_tier(config, transfer.layout, plan.context_length))
    return PrefixTiers(
        cache,
        kv,
        states,
        transfer,
        tiers,
        lambda tokens, extra_key, tenant: PrefixHasher(secret, tenant, extra_key, tokens),
        secret,
    )


def _store_keys(config: EngineConfig) -> StoreKeys:
    assert config.hicache_storage_key_file is not None
    return StoreKeys.read(config.hicache_storage_key_file.expanduser())


def _open_store_tier(config: EngineConfig, layout: EntryLayout, max_tokens: int) -> StoreTier:
    settings = StoreSettings.of(config.hicache_storage_backend_extra_config)
    return StoreTier(
        open_store(settings),
        layout,
        _store_keys(config).entries,
        max_tokens,
        config.hicache_write_policy,
        f"the Mooncake Store at {settings.master_server_address}",
        settings.global_segment_size,
    )


def new_transfer(config: EngineConfig, kv: KVPool, states: StatePool, identity: Mapping[str, str]) -> PoolTransfer:
    """Return what copies between these pools and entries, in the layout that the flags say."""
    return PoolTransfer(kv, states, identity, getattr(torch, config.hicache_state_dtype))


def _host_bytes(config: EngineConfig, plan: MemoryPlan, device: torch.device) -> int:
    """Return the size of the tier in host memory; 0: there is none.

    Raises:
        ConfigError: there is not so much memory, or the flags ask for a hierarchy of which nothing is left.
    """
    ratio = config.hicache_ratio
    if ratio is None:
        ratio = GPU_RATIO if config.enable_hierarchical_cache and device.type == "cuda" else 0.0
    num_bytes = int(config.hicache_size * GIB) or int(ratio * (plan.kv_bytes + plan.state_bytes))
    outlives = config.hicache_storage_dir is not None or config.hicache_storage_backend == "mooncake"
    if not num_bytes and config.enable_hierarchical_cache and not outlives:
        raise ConfigError(
            "--enable-hierarchical-cache: on a CPU the pools are in host memory already, so this needs "
            "--hicache-storage-dir for a folder on disk, or --hicache-size or --hicache-ratio above 0"
        )
    free = free_memory(torch.device("cpu"))
    if device.type == "cpu":
        free -= plan.total_bytes - plan.weight_bytes  # the pools take their memory when they are written
    if num_bytes > max(free, 0):
        flag = "--hicache-size" if config.hicache_size else "--hicache-ratio"
        raise ConfigError(
            f"{flag}: {num_bytes / GIB:.2f} GiB of host memory for prefixes, but {max(free, 0) / GIB:.2f} GiB are free "
            "beside the pools: lower it (files on disk have --hicache-storage-size)"
        )
    return num_bytes
