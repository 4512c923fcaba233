#!/bin/bash
# HyperPod runs this script as root on each new Slurm node, after its own set-up, possibly more than once. Do not put
# secrets into the script, because every HyperPod role of the AWS account can read it.
set -euo pipefail

log() { echo "hyperpod_ext: $*"; }

# Raise the limits of locked memory and open files: GPUs, EFA and the memory tier need more than the defaults.
cat >/etc/security/limits.d/90-hyperpod-ext.conf <<'LIMITS'
* soft memlock unlimited
* hard memlock unlimited
* soft nofile 1048576
* hard nofile 1048576
LIMITS

# Set the same limits for slurmd, because jobs inherit the limits of slurmd and not those of a login.
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

# Allow /dev/shm to use 90 % of the node's memory, because snapshots are stored in shared memory.
if mountpoint -q /dev/shm; then
    mount -o remount,size=90% /dev/shm
    log "/dev/shm may hold 90 % of the memory"
fi

log "ready"
