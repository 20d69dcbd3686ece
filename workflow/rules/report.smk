rule table:
    input:
        lambda w: results_of(experiment.runs, LAYOUTS[w.table].needs),
    output:
        f"{ROOT}/tables/{{table}}.csv",
        f"{ROOT}/tables/{{table}}.md",
        f"{ROOT}/tables/{{table}}.tex",
        report(
            f"{ROOT}/tables/{{table}}.html",
            caption="../report/table.rst",
            category="Tables",
            labels={"table": "{table}"},
        ),
    log:
        f"{LOGS}/tables/{{table}}.log",
    benchmark:
        f"{BENCHMARKS}/tables/{{table}}.tsv"
    wildcard_constraints:
        table=one_of(LAYOUTS),
    localrule: True
    conda:
        ENVIRONMENT
    params:
        rows=table_rows(),
        evaluations=f"{ROOT}/evaluations",
    message:
        "Table {wildcards.table}"
    shell:
        "maect table {wildcards.table} {output} --evaluations {params.evaluations}"
        " {params.rows:q} 2> {log}"


rule figure:
    input:
        lambda w: results_of(experiment.runs, FIGURE_NEEDS[w.figure]),
        lambda w: run_records(),
    output:
        f"{ROOT}/figures/{{figure}}.pdf",
        report(
            f"{ROOT}/figures/{{figure}}.png",
            caption="../report/figure.rst",
            category="Figures",
            labels={"figure": "{figure}"},
        ),
    log:
        f"{LOGS}/figures/{{figure}}.log",
    benchmark:
        f"{BENCHMARKS}/figures/{{figure}}.tsv"
    wildcard_constraints:
        figure=one_of(FIGURE_NEEDS),
    localrule: True
    conda:
        ENVIRONMENT
    params:
        rows=table_rows(),
        evaluations=f"{ROOT}/evaluations",
    message:
        "Figure {wildcards.figure}"
    shell:
        "maect figure {wildcards.figure} {output} --evaluations {params.evaluations}"
        " {params.rows:q} 2> {log}"


rule claims:
    input:
        records=run_records(),
        tables=expand(f"{ROOT}/tables/{{table}}.csv", table=experiment.spec.tables),
    output:
        f"{ROOT}/claims.csv",
        report(
            f"{ROOT}/claims.html",
            caption="../report/claims.rst",
            category="Claims",
            labels={"claims": "all"},
        ),
    log:
        f"{LOGS}/claims.log",
    benchmark:
        f"{BENCHMARKS}/claims.tsv"
    localrule: True
    conda:
        ENVIRONMENT
    params:
        rows=table_rows(),
        runs=lambda w, input: Path(input.records[0]).parents[1],
    message:
        "Claims"
    shell:
        "maect claims {output} --tables {input.tables} --runs {params.runs}"
        " {params.rows:q} 2> {log}"


rule tables:
    input:
        expand(f"{ROOT}/tables/{{table}}.csv", table=experiment.spec.tables),
    localrule: True


rule figures:
    input:
        expand(f"{ROOT}/figures/{{figure}}.png", figure=experiment.spec.figures),
    localrule: True


rule report_html:
    input:
        rules.tables.input,
        rules.figures.input,
        claims=rules.claims.output,
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
        config=[f"{key}={value}" for key, value in config.items()],
        snakefile=workflow.main_snakefile,
    message:
        "Report {output}"
    shell:
        "snakemake --snakefile {params.snakefile:q} --config {params.config:q}"
        " --nolock --report {output} --cores 1 tables figures {input.claims} 2> {log}"
