# Of other images the paper's numbers say nothing.
PAPER = [] if experiment.spec.compare_with_paper else ["--no-paper"]


rule table:
    input:
        lambda w: results_in(w.table, registry.TABLES[w.table].reads),
    output:
        f"{ROOT}/tables/{{table}}.csv",
        f"{ROOT}/tables/{{table}}.md",
        f"{ROOT}/tables/{{table}}.tex",
        report(
            f"{ROOT}/tables/{{table}}.html",
            caption="../report/table.rst",
            category="2 Tables",
            labels=lambda w: registry.TABLES[w.table].label,
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
        rows=lambda w: [*PAPER, *rows_of(w.table)],
        caption=lambda w: registry.TABLES[w.table].caption,
        evaluations=f"{ROOT}/evaluations",
    message:
        "Table {wildcards.table}"
    shell:
        "maect table {wildcards.table} {output} --evaluations {params.evaluations}"
        " {params.rows:q} 2> {log}"


rule figure:
    input:
        lambda w: results_in(w.figure, registry.FIGURES[w.figure].reads),
        lambda w: run_records(
            runs_in(w.figure) if registry.FIGURES[w.figure].reads_runs else []
        ),
        classes=lambda w: classes_of(w.figure),
    output:
        f"{ROOT}/figures/{{figure}}.pdf",
        report(
            f"{ROOT}/figures/{{figure}}.png",
            caption="../report/figure.rst",
            category="3 Figures",
            labels=lambda w: registry.FIGURES[w.figure].label,
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
        rows=lambda w: [*PAPER, *rows_of(w.figure)],
        caption=lambda w: registry.FIGURES[w.figure].caption,
        evaluations=f"{ROOT}/evaluations",
        classes=lambda w, input: [
            f"--classes={path}" for path in [input.classes] if path
        ],
    message:
        "Figure {wildcards.figure}"
    shell:
        "maect figure {wildcards.figure} {output} --evaluations {params.evaluations}"
        " {params.classes:q} {params.rows:q} 2> {log}"


rule claims:
    input:
        records=run_records(runs_in(*TABLES)),
        tables=expand(f"{ROOT}/tables/{{table}}.csv", table=TABLES),
    output:
        f"{ROOT}/claims.csv",
        report(
            f"{ROOT}/claims.html",
            caption="../report/claims.rst",
            category="1 Verdict",
            labels={"verdict": "Claims"},
        ),
    log:
        f"{LOGS}/claims.log",
    benchmark:
        f"{BENCHMARKS}/claims.tsv"
    localrule: True
    conda:
        ENVIRONMENT
    params:
        rows=rows_of(*TABLES),
        runs=lambda w, input: Path(input.records[0]).parents[1],
    message:
        "Claims"
    shell:
        "maect claims {output} --tables {input.tables} --runs {params.runs}"
        " {params.rows:q} 2> {log}"


rule tables:
    input:
        expand(f"{ROOT}/tables/{{table}}.csv", table=TABLES),
    localrule: True


rule figures:
    input:
        expand(f"{ROOT}/figures/{{figure}}.png", figure=FIGURES),
    localrule: True


rule report_html:
    input:
        expand(f"{ROOT}/tables/{{table}}.html", table=TABLES),
        rules.figures.input,
        rules.claims.output if TABLES else [],
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
        config=[f"{k}={'' if v is None else v}" for k, v in config.items()],
        snakefile=workflow.main_snakefile,
        style=Path(workflow.main_snakefile).parent / "workflow/report/style.css",
    message:
        "Report {output}"
    shell:
        "snakemake --snakefile {params.snakefile:q} --config {params.config:q}"
        " --nolock --report {output} --report-stylesheet {params.style:q}"
        " --cores 1 {input} 2> {log}"
