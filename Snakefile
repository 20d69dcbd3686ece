# MAE-CT from raw images to the paper's tables.
#
#   snakemake --profile cluster_profiles/local --config experiment=digits     on this machine
#   snakemake --profile cluster_profiles/SITE [--config experiment=NAME]      on a cluster
#
# Targets: shards encoders evaluations tables figures report, a table or figure by its file, any other
# result by its stamp, such as runs/RUN/done or evaluations/RUN/NAME.done.
# The rules are in workflow/, where other workflows and the catalogue of workflows find them, too.
include: "workflow/Snakefile"


workflow.default_target = "report"  # an included file cannot set it for this one
