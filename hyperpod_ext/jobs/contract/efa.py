"""Variables that EFA and NCCL need: only those that the versions in the image really read."""

from __future__ import annotations

from hyperpod_ext.config.job.resources import Libraries


def efa_environment(libraries: Libraries, *, on_host: bool, hugepages: bool) -> dict[str, str]:
    """Variables for a job whose nodes have EFA and talk to each other over it.

    `on_host`: workers run on the node's own network, not in a pod's. `hugepages`: huge pages are reserved for EFA;
    without them it must not try, because a process that uses them cannot fork.

    RDMAV_FORK_SAFE is never among them: with libfabric of today it does harm.
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
    # the network of a pod is eth0; on a host, eth0 is one of many and some lead nowhere
    variables["NCCL_SOCKET_IFNAME"] = "^docker,lo,veth,eth" if on_host else "^lo"
    return variables


def _older(version: str | None, than: tuple[int, int]) -> bool:
    return version is not None and tuple(int(part) for part in version.split(".")[:2]) < than
