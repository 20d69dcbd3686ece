# JUWELS Booster. On a login node `source envs/juwels.sh` before `make install`; on compute nodes
# every job sources it first. Not checked on site: `module spider Python` lists what there is.
if command -v module > /dev/null; then
    module --force purge
    module load Stages/2025 GCC Python # the .venv was made with this Python: keep the stage
fi
# Each of the cells of the machine has its own InfiniBand names: the host's name and an i.
if [ "${SYSTEMNAME:-}" = juwelsbooster ] && [ -n "${SLURM_JOB_NODELIST:-}" ]; then
    MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)i"
    export MASTER_ADDR
fi
if [ -e /sys/class/net/ib0 ]; then
    export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
fi
# Compute nodes have no internet: nothing may try.
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
