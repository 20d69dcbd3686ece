# JUWELS Booster. On a login node `source envs/juwels.sh`; every job sources it on its nodes.
# Not checked on site: `module spider Python` lists what there is.
if command -v module > /dev/null; then
    module --force purge
    module load Stages/2025 GCC Python # .venv is made with this Python: keep the stage
fi
# Across the machine's cells nodes reach each other by their InfiniBand name: the host's and an i.
if [ "${SYSTEMNAME:-}" = juwelsbooster ] && [ -n "${SLURM_JOB_NODELIST:-}" ]; then
    MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)i"
    export MASTER_ADDR
fi
# Links between cells come and go: the longest wait, 17 s, tried seven times, is less than the trainer's.
export NCCL_IB_TIMEOUT=22
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
