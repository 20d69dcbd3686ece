# Parts of the report's menu, in its order.
CATEGORIES = ["Summary", *(p.category for p in PAGES.values() if p.names(experiment))]
CATEGORIES = list(dict.fromkeys(CATEGORIES))

for page in PAGES.values():
    pattern = f"{page.folder}/{{page}}" if page.folder else page.name
    *unshown, shown = [f"{ROOT}/{pattern}.{ending}" for ending in page.endings]

    rule:
        name:
            page.name
        input:
            config=resolved(page.name, f"{ROOT}/{pattern}.yaml"),
            made_of=lambda w, page=page: stamps(
                page.inputs(experiment, name_of(w, page))
            ),
        output:
            unshown,
            report(
                shown,
                caption="../report/page.rst",
                category=(
                    f"{CATEGORIES.index(page.category) + 1} {page.category}"
                    if page.category in CATEGORIES
                    else page.category
                ),
                labels=lambda w, page=page: page.label(experiment, name_of(w, page)),
            ),
        log:
            f"{LOGS}/{pattern}.log",
        benchmark:
            f"{BENCHMARKS}/{pattern}.tsv"
        wildcard_constraints:
            page=one_of(page.names(experiment)),
        localrule: True
        conda:
            ENVIRONMENT
        params:
            config=f"{ROOT}/{pattern}.yaml",
            caption=lambda w, page=page: page.caption(experiment, name_of(w, page)),
        message:
            page.title.format(page="{wildcards.page}")
        shell:
            "maect page {params.config:q} 2> {log:q}"


# Snakemake does not miss what a table was made of, once that is there: targets name it.
SHOWN = stamps(
    file
    for page in PAGES.values()
    if page.folder
    for name in page.names(experiment)
    for file in page.inputs(experiment, name)
    if experiment.root / "evaluations" in file.parents
)


rule tables:
    input:
        LOST_SHARDS,
        expand(f"{ROOT}/tables/{{table}}.csv", table=PAGES["table"].names(experiment)),
    localrule: True


rule figures:
    input:
        LOST_SHARDS,
        expand(
            f"{ROOT}/figures/{{figure}}.png", figure=PAGES["figure"].names(experiment)
        ),
    localrule: True


rule report_html:
    input:
        config=resolved("report_html", f"{ROOT}/report.yaml"),
        shown=report_inputs(experiment),
    output:
        f"{ROOT}/report.html",
    log:
        f"{LOGS}/report.log",
    benchmark:
        f"{BENCHMARKS}/report.tsv"
    localrule: True
    conda:
        ENVIRONMENT
    params:
        config=f"{ROOT}/report.yaml",
        changes=[f"{k}={'' if v is None else v}" for k, v in config.items()],
        snakefile=workflow.main_snakefile,
        style=Path(workflow.main_snakefile).parent / "workflow/report/style.css",
    message:
        "Report {output}"
    shell:
        "python3 -P -m maect.tools.start_snakemake"
        " --profile none --workflow-profile none"
        " --snakefile {params.snakefile:q} --config {params.changes:q}"
        " --nolock --report {output} --report-stylesheet {params.style:q}"
        " --cores 1 {input.shown} 2> {log} && maect page {params.config:q} 2>> {log}"
