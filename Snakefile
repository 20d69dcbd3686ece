# MAE-CT from raw images to the paper's tables.
#
#   snakemake --profile cluster_profiles/local --config experiment=digits     on this machine
#   snakemake --profile cluster_profiles/SITE [--config experiment=NAME]      on a cluster
#
# Targets: shards encoders evaluations tables figures report, or any file below the results folder.
from snakemake.utils import min_version

min_version("9.15")


report: "workflow/report/workflow.rst"


include: "workflow/rules/common.smk"
include: "workflow/rules/data.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/evaluate.smk"
include: "workflow/rules/fine_tune.smk"
include: "workflow/rules/report.smk"


rule report:
    default_target: True
    input:
        rules.report_html.output,
    localrule: True
