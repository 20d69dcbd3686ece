# Sourced on the compute node before a job starts: make the environment of `make install` work there.
# Load the modules that your site's documentation asks for, above all the Python that `.venv` was
# made with:
#   module load Python
# and where NCCL should not use ib0, name the interface after the last line:
#   export NCCL_SOCKET_IFNAME=hsn0 GLOO_SOCKET_IFNAME=hsn0
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
