# Alps (Daint, Clariden). On a login node `source envs/alps.sh`; every job sources it on its nodes.
# Not checked on site. Python comes with an environment of the site (`uenv start prgenv-gnu/24.11:v2
# --view=default`) or as a build of its own (`uv python install`); there are no modules.
# Between nodes NCCL needs the site's plugin for Slingshot (aws-ofi-nccl); without it goes over TCP.
export NCCL_SOCKET_IFNAME=hsn GLOO_SOCKET_IFNAME=hsn0
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
