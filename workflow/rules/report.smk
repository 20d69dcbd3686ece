# One rule for each kind of page (maect/experiment/pages.py): table, figure, claims and so on.
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
            report(shown, category=page.category),
        log:
            f"{LOGS}/{pattern}.log",
        benchmark:
            f"{BENCHMARKS}/{pattern}.tsv"
        wildcard_constraints:
            page=one_of(page.names(experiment)),
        conda:
            ENVIRONMENT
        params:
            config=f"{ROOT}/{pattern}.yaml",
        message:
            page.title.format(page="{wildcards.page}")
        shell:
            "maect page {params.config:q} 2> {log:q}"


# Targets name the evaluations, too: Snakemake would not notice that one is missing behind an
# existing table.
SHOWN = stamps(shown_evaluations(experiment))


rule tables:
    input:
        expand(f"{ROOT}/tables/{{table}}.csv", table=PAGES["table"].names(experiment)),
    localrule: True


rule figures:
    input:
        expand(
            f"{ROOT}/figures/{{figure}}.png", figure=PAGES["figure"].names(experiment)
        ),
    localrule: True


# The resolved file names all that is read; other files than pages are made before these.
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
    message:
        "Report {output}"
    shell:
        "maect page {params.config:q} 2> {log:q}"


# Snakemake's own report: the appendix, of the rules and jobs behind the results.
rule workflow_html:
    input:
        shown=[*report_inputs(experiment), *rules.report_html.output],
    output:
        f"{ROOT}/workflow.html",
    log:
        f"{LOGS}/workflow.log",
    benchmark:
        f"{BENCHMARKS}/workflow.tsv"
    localrule: True
    conda:
        ENVIRONMENT
    message:
        "Snakemake's report {output}"
    shell:
        pipeline.workflow_command(config, Path(workflow.main_snakefile))
