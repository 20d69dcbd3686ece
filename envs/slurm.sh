# Sourced on the compute node before a job starts: make the environment of `make install` work there.
# Load what your site's documentation asks for, for example
#   module load CUDA
# and name the network interface for NCCL and gloo where a node has several:
#   export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
