# Alps (Daint, Clariden). On a login node `source envs/alps.sh`; every job sources it on its nodes.
# Not checked on site. Once:
#   uenv image pull prgenv-gnu/25.6:v2
# and then, to install and to start Snakemake, in a shell of it, which has Python 3.13:
#   uenv start --view=default prgenv-gnu/25.6:v2
# Jobs get the same from the profile. Its Python packages are not ours.
unset PYTHONPATH
# As docs.cscs.ch asks (software/communication/nccl): between nodes by the uenv's plugin for
# Slingshot. Where that is missing, NCCL ends, instead of taking TCP at a fraction of the rate.
export NCCL_SOCKET_IFNAME=hsn GLOO_SOCKET_IFNAME=hsn0
export NCCL_NET="AWS Libfabric" NCCL_NET_GDR_LEVEL=PHB NCCL_CROSS_NIC=1 NCCL_PROTO=^LL128
export FI_CXI_DEFAULT_CQ_SIZE=131072 FI_CXI_DEFAULT_TX_SIZE=16384 FI_CXI_DISABLE_HOST_REGISTER=1
export FI_CXI_RX_MATCH_MODE=software FI_MR_CACHE_MONITOR=userfaultfd MPICH_GPU_SUPPORT_ENABLED=0
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
