# MAE-CT from raw images to the paper's tables.
#
#   snakemake --profile cluster_profiles/local --config experiment=digits     on this machine
#   snakemake --profile cluster_profiles/SITE [--config experiment=NAME]      on a cluster
#
# Targets: shards encoders evaluations tables figures report, a table or figure by its file, any other
# result by its stamp, such as runs/RUN/done or evaluations/RUN/NAME.done.
# Every stage (maect/stages) and every protocol (maect/evaluate) has a rule of its name; everything a
# job is told is in one file, such as runs/RUN/config.yaml, written when Snakemake starts.
from snakemake.utils import min_version

min_version("9.20")


report: "workflow/report/workflow.rst"


include: "workflow/rules/common.smk"
include: "workflow/rules/data.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/evaluate.smk"
include: "workflow/rules/report.smk"


# What the file evaluates and no table or figure shows is made, too, unless less is asked for.
rule report:
    default_target: True
    input:
        LOST_SHARDS,
        rules.report_html.output,
        SHOWN if {"tables", "figures"} & config.keys() else rules.evaluations.input,
    localrule: True


onstart:
    start()


onsuccess:
    pipeline.say_where_the_report_is(experiment, began)
