"""Environment variables for EFA and NCCL that the library versions in the image read."""

from __future__ import annotations

from hyperpod_ext.config.job.resources import Libraries


def efa_environment(libraries: Libraries, *, on_host: bool, hugepages: bool) -> dict[str, str]:
    """Return the variables for a job whose nodes communicate over EFA.

    RDMAV_FORK_SAFE is not among them, because it does harm with current libfabric.

    Args:
        on_host: workers use the node's network, not a pod's.
        hugepages: huge pages are reserved for EFA. Otherwise EFA must not use them: its process could not fork.
    """
    variables: dict[str, str] = {}
    if not hugepages:
        variables["FI_EFA_USE_HUGE_PAGE"] = "0"
    if _older(libraries.libfabric, (1, 18)) or _older(libraries.ofi_nccl, (1, 6)):
        variables["FI_PROVIDER"] = "efa"
    if _older(libraries.ofi_nccl, (1, 6)):
        variables["NCCL_PROTO"] = "simple"
    if _older(libraries.ofi_nccl, (1, 7)):
        variables["FI_EFA_USE_DEVICE_RDMA"] = "1"
    # a pod's network is eth0; a host has many interfaces, some without a route
    variables["NCCL_SOCKET_IFNAME"] = "^docker,lo,veth,eth" if on_host else "^lo"
    return variables


def _older(version: str | None, than: tuple[int, int]) -> bool:
    return version is not None and tuple(int(part) for part in version.split(".")[:2]) < than
