# Leonardo Booster. On a login node `source envs/leonardo.sh`; every job sources it on its nodes.
# Not checked on site: `module av python` lists what there is.
if command -v module > /dev/null; then
    module load python # .venv is made with this Python: name its version once it works
fi
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
