# MareNostrum 5 ACC. On a login node `source envs/marenostrum5.sh`; every job sources it on its nodes.
# Not checked on site: `module av python` lists what there is. No node has internet, login nodes
# included: make `.venv` elsewhere, at the same path, and copy it.
if command -v module > /dev/null; then
    module purge
    module load python # .venv is made with this Python: name its version once it works
fi
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
