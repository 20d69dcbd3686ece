# MeluXina, which has modules on compute nodes only: `salloc` one (partition cpu, qos dev) and
# `source envs/meluxina.sh` there before `make install`; every job sources it on its nodes.
# Not checked on site: `module av Python` lists what there is.
if command -v module > /dev/null; then
    module load env/release/2024.1 Python # .venv is made with this Python: keep the release
fi
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
