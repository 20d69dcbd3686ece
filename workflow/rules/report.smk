TABLES, FIGURES = resolve.tables(experiment), resolve.figures(experiment)
COMPARE = experiment.spec.compare_with_paper


rule table:
    input:
        lambda w: resolve.read_by_shown(experiment, w.table, figure=False),
    output:
        f"{ROOT}/tables/{{table}}.csv",
        f"{ROOT}/tables/{{table}}.md",
        f"{ROOT}/tables/{{table}}.tex",
        report(
            f"{ROOT}/tables/{{table}}.html",
            caption="../report/table.rst",
            category="2 Tables",
            labels=lambda w: registry.TABLES[w.table].label(COMPARE),
        ),
    log:
        f"{LOGS}/tables/{{table}}.log",
    benchmark:
        f"{BENCHMARKS}/tables/{{table}}.tsv"
    wildcard_constraints:
        table=one_of(TABLES),
    localrule: True
    conda:
        ENVIRONMENT
    params:
        config=f"{ROOT}/tables/{{table}}.yaml",
        caption=lambda w: registry.TABLES[w.table].about(COMPARE),
        compare=COMPARE,
    message:
        "Table {wildcards.table}"
    shell:
        "maect table {params.config:q} 2> {log:q}"


rule figure:
    input:
        lambda w: resolve.read_by_shown(experiment, w.figure, figure=True),
    output:
        f"{ROOT}/figures/{{figure}}.pdf",
        report(
            f"{ROOT}/figures/{{figure}}.png",
            caption="../report/figure.rst",
            category=f"{2 + bool(TABLES)} Figures",
            labels=lambda w: registry.FIGURES[w.figure].label(COMPARE),
        ),
    log:
        f"{LOGS}/figures/{{figure}}.log",
    benchmark:
        f"{BENCHMARKS}/figures/{{figure}}.tsv"
    wildcard_constraints:
        figure=one_of(FIGURES),
    localrule: True
    conda:
        ENVIRONMENT
    params:
        config=f"{ROOT}/figures/{{figure}}.yaml",
        caption=lambda w: registry.FIGURES[w.figure].about(COMPARE),
    message:
        "Figure {wildcards.figure}"
    shell:
        "maect figure {params.config:q} 2> {log:q}"


rule claims:
    input:
        resolve.run_records(experiment, TABLES),
        expand(f"{ROOT}/tables/{{table}}.csv", table=TABLES),
    output:
        f"{ROOT}/claims.csv",
        report(
            f"{ROOT}/claims.html",
            caption="../report/claims.rst",
            category="1 Summary",
            labels={"page": "Claims"},
        ),
    log:
        f"{LOGS}/claims.log",
    benchmark:
        f"{BENCHMARKS}/claims.tsv"
    localrule: True
    conda:
        ENVIRONMENT
    params:
        config=f"{ROOT}/claims.yaml",
    message:
        "Claims"
    shell:
        "maect claims {params.config:q} 2> {log:q}"


rule images:
    input:
        resolve.read_by_images(experiment),
    output:
        report(
            f"{ROOT}/images.html",
            caption="../report/images.rst",
            category="1 Summary",
            labels={"page": "Images"},
        ),
    log:
        f"{LOGS}/images.log",
    benchmark:
        f"{BENCHMARKS}/images.tsv"
    localrule: True
    conda:
        ENVIRONMENT
    params:
        config=f"{ROOT}/images.yaml",
    message:
        "Page of images"
    shell:
        "maect images {params.config:q} 2> {log:q}"


rule summary:
    input:
        list(resolve.read_by_summary(experiment).values()),
    output:
        report(
            f"{ROOT}/summary.html",
            caption="../report/summary.rst",
            category="1 Summary",
            labels={"page": "Summary"},
        ),
    log:
        f"{LOGS}/summary.log",
    benchmark:
        f"{BENCHMARKS}/summary.tsv"
    localrule: True
    conda:
        ENVIRONMENT
    params:
        config=f"{ROOT}/summary.yaml",
    message:
        "First page of the report"
    shell:
        "maect summary {params.config:q} 2> {log:q}"


# Snakemake does not miss what a table was made of, once that is there: targets name it.
SHOWN = [
    str(file)
    for figure, names in ((False, TABLES), (True, FIGURES))
    for name in names
    for file in resolve.read_by_shown(experiment, name, figure=figure)
    if experiment.root / "evaluations" in file.parents
]


rule tables:
    input:
        LOST_SHARDS,
        expand(f"{ROOT}/tables/{{table}}.csv", table=TABLES),
    localrule: True


rule figures:
    input:
        LOST_SHARDS,
        expand(f"{ROOT}/figures/{{figure}}.png", figure=FIGURES),
    localrule: True


rule report_html:
    input:
        resolve.read_by_report(experiment),
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
        "snakemake --snakefile {params.snakefile:q} --config {params.changes:q}"
        " --nolock --report {output} --report-stylesheet {params.style:q}"
        " --cores 1 {input} 2> {log}"
