# Karolina. On a login node `source envs/karolina.sh`; every job sources it on its nodes.
# Not checked on site: `module av Python` lists what there is.
if command -v module > /dev/null; then
    module purge
    module load Python # .venv is made with this Python: name its version once it works
fi
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
