#!/bin/sh
# tiny-gpt: what each of its 2 nodes runs. Whoever starts it sets
#   HPX_NODE_RANK      which node this is, counted from 0
#   HPX_RDZV_ENDPOINT  host:port where the nodes meet
#   HPX_SECRET_FILE    the secret that members of this job know each other by
#   HPX_RUN_DIR        folder for events, report and logs of this run
#   HPX_SOURCE_DIR     folder of the script
#   HPX_SOCKET_DIR     private folder for sockets, if not one that the agent makes
#   HPX_REJOIN         set when the node is started again while the job runs
#   HPX_PYTHON         the interpreter, if it is not python3
set -eu
export HPX_RUNTIME='{"name":"tiny-gpt","nodes":2,"workers_per_node":2,"spares":0,"global_batch_size":16,"seed":0,"shared_memory_mib":null,"checkpoint":{"tiers":[{"kind":"memory","every_steps":1,"budget_mib":null}],"overlap":true,"when_busy":"supersede","finish_s":3600.0,"grace_s":25.0},"restart":{"max_restarts":10,"max_restarts_in_window":null,"window_s":3600.0,"leave_timeout_s":30.0,"lease_s":6.0,"node_wait_s":30.0,"form_timeout_s":600.0,"max_in_process":3,"max_on_node":3,"max_node_losses":3,"quarantine_after":2,"calm_steps":20,"hang":{"enabled":true,"floor_s":30.0,"factor":10.0,"first_step_s":1800.0,"heartbeat_s":60.0,"dump_s":2.0},"nan":{"action":"off","max_skips":10},"health":{"checks":["shared-memory","disk","network","gpu"],"disk_mib":64,"timeout_s":10.0},"compare_replicas_every":100,"preload":["torch","torch.distributed","torch.nn.parallel","torch._dynamo"],"warm_spares":false},"chaos":{"faults":[{"kind":"kill","rank":2,"node":null,"step":13}],"inject":[],"compare":true,"on_clusters":false}}'
cd "$HPX_SOURCE_DIR"
exec "${HPX_PYTHON:-python3}" -m hyperpod_ext.runtime.agent \
    --nnodes 2 \
    --nproc-per-node 2 \
    --node-rank "$HPX_NODE_RANK" \
    --rdzv-endpoint "$HPX_RDZV_ENDPOINT" \
    ${HPX_REJOIN:+--rejoin} \
    -- train.py --steps 40
