# JUPITER Booster. On a login node `source envs/jupiter.sh`; every job sources it on its nodes.
# Not checked on site: `module spider Python` lists what there is.
if command -v module > /dev/null; then
    module --force purge
    module load Stages/2026 GCC Python # .venv is made with this Python: keep the stage
fi
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
