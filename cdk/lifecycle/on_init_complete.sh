#!/bin/bash
# Runs on each new Slurm node, as root, once HyperPod's own set-up is done; it may run again. Everybody in the account
# who runs HyperPod can read it: no secrets here.
set -euo pipefail

log() { echo "hyperpod_ext: $*"; }

# Pinned memory of GPUs and EFA, and the memory tier, need more locked memory and open files than the defaults.
cat >/etc/security/limits.d/90-hyperpod-ext.conf <<'LIMITS'
* soft memlock unlimited
* hard memlock unlimited
* soft nofile 1048576
* hard nofile 1048576
LIMITS

# Jobs inherit the limits of slurmd, not those of a login.
if systemctl cat slurmd.service >/dev/null 2>&1; then
    mkdir -p /etc/systemd/system/slurmd.service.d
    cat >/etc/systemd/system/slurmd.service.d/90-hyperpod-ext.conf <<'UNIT'
[Service]
LimitMEMLOCK=infinity
LimitNOFILE=1048576
UNIT
    systemctl daemon-reload
    log "slurmd gets the new limits when it next starts"
fi

# Snapshots live in shared memory: as much as 90 % of it may be used.
if mountpoint -q /dev/shm; then
    mount -o remount,size=90% /dev/shm
    log "/dev/shm may hold 90 % of the memory"
fi

log "ready"
