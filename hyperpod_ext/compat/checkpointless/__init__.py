"""Names of AWS's package `hyperpod_checkpointless_training`, each loaded at its first use."""

from __future__ import annotations

from hyperpod_ext.lazy import loader

_MODULES = {
    **dict.fromkeys(
        (
            "CheckpointManager",
            "HPAgentK8sAPIFactory",
            "HPCallWrapper",
            "HPWrapper",
            "PEFTCheckpointManager",
            "patch_megatron_optimizer",
            "wait_rank",
        ),
        ".wrap",
    ),
    **dict.fromkeys(("CheckpointlessAbortManager", "CheckpointlessFinalizeCleanup", "CudaHealthCheck"), ".handlers"),
    **dict.fromkeys(("debug_msg", "get_logger", "memory_status"), ".logs"),
    **dict.fromkeys(("CacheResumeMMAPConfig", "CheckpointlessDataModule", "MMAPDataModule", "SkipDataLoader"), ".data"),
    **dict.fromkeys(
        (
            "CheckpointlessAutoResume",
            "CheckpointlessCallback",
            "CheckpointlessCompatibleConnector",
            "CheckpointlessMegatronStrategy",
            "DataModuleEpochCallback",
            "HCTProgressBar",
        ),
        ".trainer",
    ),
}

__all__ = sorted(_MODULES)

__getattr__ = loader(__name__, _MODULES)
